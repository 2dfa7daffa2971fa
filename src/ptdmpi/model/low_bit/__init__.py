"""Weights in few bits: codes and scales of blocks, packed bytes, and what products take of them."""
