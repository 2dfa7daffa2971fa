"""Mixture of experts: the choice of experts for each token, and the experts' computation."""
