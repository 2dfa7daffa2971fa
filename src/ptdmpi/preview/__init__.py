"""Commands that work before a run starts: previews with checks, sizes and times, drafts of
configurations, and job scripts."""
