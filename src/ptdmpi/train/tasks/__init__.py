"""The tasks on which a run is trained or evaluated."""
