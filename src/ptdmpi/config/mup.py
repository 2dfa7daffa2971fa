"""The maximal update parametrization (muP: Yang et al. 2022, arXiv 2203.03466, Table 8 and appendix
B.1): a model of any width trains with the learning rate that is best for a narrow base model.

Let m = hidden / mup_base_hidden and D = head_size. The table gives the changes that muP makes:

                            embeddings, norms, biases   matrices of layers   head
    initial variance                  1                        1/m            1
    factor of the output              1                         1            1/m
    learning rate: AdamW, Lion        1                        1/m            1
                   SGD                m                         1             m
                   Muon          as AdamW       1 (original), 1/sqrt(m)   as AdamW
    attention scale       sqrt(mup_base_head_size) / D instead of 1 / sqrt(D)

The head has the same initial values and the same learning rate as the embedding, so the weights of
the two may be tied. With `muon_scale = "match_rms_adamw"`, the elements of Muon's updates have the
same root mean square at any width, so the spectral norm of an update would grow as sqrt(m). The
factor 1/sqrt(m) prevents this growth (Yang et al. 2023, arXiv 2310.17813). The weight decay of a
step does not depend on m, because the decay is computed from the learning rate without muP's
factor.
"""

from ptdmpi.config.sections import OptimizerConfig


def learning_rate_factor(optimizer: OptimizerConfig, ratio: float, *, in_layers: bool) -> float:
    """Return the factor by which muP multiplies the learning rate of a parameter, in a model that
    is `ratio` times wider than its base. `in_layers` is True for a matrix of a layer."""
    if optimizer.kind == "sgd":
        return 1.0 if in_layers else ratio
    if not in_layers:
        return 1.0
    if optimizer.kind == "muon":
        return 1.0 if optimizer.muon_scale == "original" else ratio**-0.5
    return 1.0 / ratio
