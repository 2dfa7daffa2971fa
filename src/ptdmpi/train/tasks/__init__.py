"""The tasks that a run trains on, or is measured by."""
