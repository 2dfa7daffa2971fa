"""The preview of a run: its checks, sizes and times before it starts. Nothing is written."""
