"""Multi-head latent attention: the functions between its linear layers."""
