"""The modules that only multi-head latent attention needs: they make queries, keys and values by
head, cache latent vectors, and use fused kernels for values that are smaller than keys."""
