"""Compressors: from rows of numbers to packed bytes and back, each with a bound on its error.

A compressor always works on a unit of a logical parameter (`units`). Its bits therefore depend
neither on the layout nor on the other parameters that a rank holds.
"""
