"""Sinks: tools such as TensorBoard that get the records of a run in addition to `metrics.jsonl`,
and messages about the events of a run. The packages of each tool are an optional extra."""
