"""Quantized weights: the codes and scales of blocks, the codes packed into bytes, and the
dequantized values with which matrix products are computed."""
