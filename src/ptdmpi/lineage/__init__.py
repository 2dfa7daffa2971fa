"""What a run was trained on, whether it may go on with what it is given now, and its attempts."""
