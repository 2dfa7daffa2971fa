"""Predictions compared with published and with measured runs."""
