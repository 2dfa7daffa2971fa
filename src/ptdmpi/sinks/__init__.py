"""Sinks pass the records of a run, which are also in `metrics.jsonl`, to tools such as TensorBoard.
This package also sends messages about the events of a run. The packages of each tool are an
optional extra."""
