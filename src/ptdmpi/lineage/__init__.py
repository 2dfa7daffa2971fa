"""Lineage of a run: the data it was trained on, whether it may resume with its present data and
configuration, and its attempts."""
