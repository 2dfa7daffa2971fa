"""Multi-head latent attention: the operations between its linear layers and the core of
attention."""
