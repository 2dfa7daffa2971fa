"""Commands that prepare a run: previews of its checks, sizes and times, drafts of its
configuration, and job scripts."""
