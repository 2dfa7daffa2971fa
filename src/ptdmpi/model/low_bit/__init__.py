"""Quantized weights: codes and scales of blocks, packed bytes, and the values that products use."""
