"""One GPU, measured in nine minutes at most: correctness, speed, and a page about both"""
