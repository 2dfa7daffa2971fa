"""The lineage of a run: the data on which it was trained, whether it may resume with its present
data and configuration, and its attempts."""
