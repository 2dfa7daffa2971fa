"""A test that training computes the same in every layout. Small models are trained in a set of
layouts that covers all pairs of settings. Each training run is compared with one on a single rank,
and its bits with those of the plainest layout that must have the same bits."""
