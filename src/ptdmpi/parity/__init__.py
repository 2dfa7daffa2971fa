"""The same training in every layout, proven: small models trained in a set of layouts that covers
all pairs of settings, each compared with one rank and, to the bit, with its plainest layout."""
