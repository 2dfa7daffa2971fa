"""Multi-head latent attention: its sublayer, and the operators that only this sublayer has."""
