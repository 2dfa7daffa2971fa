"""Compressors of gradients. A compressor encodes rows of numbers as packed bytes, and decodes the
bytes again. For each compressor, a bound of the compression error is known.

A compressor works on compression blocks, each of which is a part of one logical (unsharded)
parameter (see `units`). The result of a compressor therefore depends neither on the layout (the
division of the model and its data among ranks) nor on the other parameters of the rank.
"""
