"""A test that training computes the same in every layout. Small models are trained in a set of
layouts that covers all pairs of settings. Each training run is compared with a run on a single
rank. The bits of its results are also compared with the bits of the plainest layout that must give
the same bits."""
