"""The measurement of one GPU in at most nine minutes: correctness, speed, and a page with the
results."""
