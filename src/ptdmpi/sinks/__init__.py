"""Tools that show the records of a run besides `metrics.jsonl`, as extras."""
