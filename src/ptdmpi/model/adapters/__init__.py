"""Adapters: the trained modules on a frozen model, which its linears call."""
