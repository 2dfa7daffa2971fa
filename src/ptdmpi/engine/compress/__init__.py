"""Compressors of gradients: from rows of numbers to packed bytes and back, each with a bound on its
error.

A compressor always works on a compression block, which is a part of a logical parameter (`units`).
The result of a compressor therefore depends neither on the layout nor on the other parameters that
a rank has.
"""
