"""Previews before a run starts: checks, sizes and times of the run, first configurations, and job
scripts."""
