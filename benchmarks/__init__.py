"""Measurements in eight folders, over a launcher (`launch`), rounds in which sides take turns
(`turns`), and tables in pages of docs/ (`marks`)."""
