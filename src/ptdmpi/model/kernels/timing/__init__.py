"""Timing of the trainer's kernels on the machine at hand: by `ptdmpi probe` for a cluster file, and
by the first training of a model (`run.kernels = "auto"`)."""
