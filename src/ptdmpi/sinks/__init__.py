"""Tools that show the records of a run in addition to `metrics.jsonl`; each is an extra."""
