"""A picture of the measurements, and a table of scaling."""
