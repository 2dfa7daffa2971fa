"""Preparations before the first step: checks of the layout and of the model, and compilation."""
