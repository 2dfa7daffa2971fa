"""Runs that are killed, damaged and starved, and what saving costs."""
