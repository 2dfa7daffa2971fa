"""Upcycling: a dense model becomes a mixture of experts."""
