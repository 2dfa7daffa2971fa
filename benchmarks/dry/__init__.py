"""`make gpu-dry`: training on a null GPU, which takes every launch and computes nothing, and the
counts of launches, waits, bytes and memory."""
