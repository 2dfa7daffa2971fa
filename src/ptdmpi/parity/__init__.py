"""A test that training gives the same results in every layout. Small models are trained in a set of
layouts that covers all pairs of settings. Each training run is compared with a run on a single
rank. The bits of the results are also compared with the bits of another layout: the plainest one
that must give the same bits."""
