"""What of the measurements is shown beside their table."""
