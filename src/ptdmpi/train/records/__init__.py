"""The measurements and records of a run: rates, timelines, log lines, and a record of each step."""
