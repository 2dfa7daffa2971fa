"""Compressors: from rows of numbers to packed bytes and back, each with a property that it keeps.

What is compressed is always a unit of a logical parameter (`units`), so that neither the layout nor
what else a rank holds changes a bit of it.
"""
