"""One GPU, measured in nine minutes at most: what is right, what is quick, and a page about it"""
