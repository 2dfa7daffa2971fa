"""A run before it starts: everything checked, sized, timed and shown; nothing is written."""
