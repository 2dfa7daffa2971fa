"""A proof that the training is the same in every layout. Small models are trained in a set of
layouts that covers all pairs of settings. Each training is compared with one on one rank, and its
bits with those of its plainest layout."""
