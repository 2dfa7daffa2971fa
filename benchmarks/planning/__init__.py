"""Predictions beside published and measured runs."""
