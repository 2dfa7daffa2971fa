"""Timing of the trainer's kernels on this machine. The command `ptdmpi probe` times kernels for a
cluster file. The first training of a model times kernels if `run.kernels = "auto"`."""
