"""Mixture of experts: the choice of experts for each token, and their products."""
