"""The lineage of a run: the data on which the run was trained, the decision whether it may resume
with its present data and configuration, and its attempts."""
