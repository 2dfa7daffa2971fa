"""Where the records of a run go besides `metrics.jsonl`: tools that people have open, as extras."""
