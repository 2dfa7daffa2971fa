"""The picture of the measurements, and the table of scaling."""
