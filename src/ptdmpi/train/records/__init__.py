"""The measurements and records of a run: rates, timelines, lines and records of each step."""
