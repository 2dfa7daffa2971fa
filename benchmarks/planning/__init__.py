"""Comparisons of the planner's predictions with published and with measured runs."""
