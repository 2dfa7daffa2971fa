"""Quantized weights: the codes and scales of blocks, their packed bytes, and the dequantized values
that matrix products use."""
