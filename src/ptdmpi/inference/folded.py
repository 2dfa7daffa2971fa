"""The factors of muP (`ptdmpi.config.mup`), folded into the weights, because models of
`transformers` do not have these factors.

The weights of the final norm are multiplied by the factor of the logits. The head comes after this
norm, so the weights of the head do not change and may stay tied to the embedding. muP also has a
factor for the products of queries and keys. The weights that compute the queries are multiplied by
this factor. If the queries have a norm, the weights of this norm are multiplied instead.
"""

import torch
from torch import Tensor

from ptdmpi.base.box import Box
from ptdmpi.config import InputError, ModelConfig


def fold(
    model: ModelConfig, name: str, box: Box, values: Tensor, *, inverse: bool = False
) -> Tensor:
    """Return `values` multiplied by the factor of muP for the parameter `name`, in float64. If
    `inverse` is True, return `values` divided by the factor. `values` is the slice `box` of the
    parameter. Parameters without a factor, and all parameters of models without muP, are returned
    unchanged."""
    factor = query_factor(model)
    rows = 0
    if name.startswith("final_norm."):
        factor = 1.0 / model.width_ratio
        rows = len(values)
    elif ".query_norm." in name:
        rows = len(values)
    elif ".attention.qkv." in name and not model.qk_norm:
        rows = max(0, model.attention_width - box.start[0])
    if factor == 1.0 or not rows:
        return values
    # a zero-centered norm stores its scale minus 1, so add 1 before the multiplication
    is_scale = "norm." in name and name.endswith("weight")
    offset = 1.0 if model.zero_centered_norm and is_scale else 0.0
    folded = values.to(torch.float64, copy=True)
    changed = folded[:rows] + offset
    folded[:rows] = (changed / factor if inverse else changed * factor) - offset
    return folded


def query_factor(model: ModelConfig) -> float:
    """Return the factor of muP for the products of queries and keys: the scale of the products with
    muP, divided by their scale in the same model without muP."""
    plain = model.model_copy(update={"mup_base_head_size": 0})
    return model.attention_scale / plain.attention_scale


def require_unpacked(model: ModelConfig) -> None:
    """Raise InputError if muP has a factor for the weights of the queries. Quantized weights cannot
    be multiplied by a factor."""
    if query_factor(model) != 1.0 and not model.qk_norm:
        raise InputError(
            f"model.mup_base_head_size = {model.mup_base_head_size}: to-hf multiplies the weights "
            "of the queries by a factor, so they cannot stay quantized; legal: no --packed"
        )
