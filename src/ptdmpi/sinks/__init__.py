"""Sinks: tools such as TensorBoard that get the records of a run in addition to `metrics.jsonl`.
The packages of each tool are an optional extra."""
