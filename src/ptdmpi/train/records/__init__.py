"""The measurements and records of a run: rates, timelines, and a log line and a record of each
step."""
