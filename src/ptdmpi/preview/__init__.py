"""A run before it starts: checked, sized, timed and shown, without writing anything."""
