"""Compressors of gradients: they encode rows of numbers as packed bytes and decode them. The error
of each compressor has a known bound.

A compressor always works on a compression block, which is a part of a logical parameter (see
`units`). The result of a compressor therefore does not depend on the layout, and not on the other
parameters of the rank.
"""
