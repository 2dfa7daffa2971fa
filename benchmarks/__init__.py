"""Measurements: eight rooms over one launcher (`launch`) and one way of taking turns (`turns`)."""
