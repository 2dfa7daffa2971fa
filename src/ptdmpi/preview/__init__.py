"""Everything before a run starts: a preview with checks, sizes and times, drafts of configurations,
and job scripts."""
