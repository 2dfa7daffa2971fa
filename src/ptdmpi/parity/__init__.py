"""A test that training gives the same results in every layout. Small models are trained in a set of
layouts that covers all pairs of settings. Each training run is compared with a run on a single
rank. Each run is also compared bit by bit with a run in another layout: the simplest layout that
must give the same bits."""
