"""Memory of activations: what a layer keeps, what its operations need beside, by what is stored."""
