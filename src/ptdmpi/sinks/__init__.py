"""Sinks pass the records of a run, which are also in `metrics.jsonl`, to tools such as TensorBoard.
This package also sends messages about the events of a run. Each tool needs packages of its own,
which are an optional extra of ptdmpi."""
