"""The lineage of a run: the data on which the run was trained, the check whether the run may resume
with its present data and configuration, and the attempts of the run (the starts of its training
program)."""
