"""`make gpu-dry`: counts of launches, waits, bytes and memory when ptdmpi and other trainers train
on a null GPU, which accepts every launch and computes nothing."""
