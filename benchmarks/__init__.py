"""Measurements: four rooms over one launcher (`launch`) and one way of taking turns (`turns`)."""
