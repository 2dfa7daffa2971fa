"""The operators of attention between its two linear layers."""
