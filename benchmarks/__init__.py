"""Measurements: five rooms over one launcher (`launch`) and one way of taking turns (`turns`)."""
