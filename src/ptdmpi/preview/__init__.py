"""Before a run starts: its checks, sizes and times, first configurations, and job scripts."""
