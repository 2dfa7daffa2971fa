"""The attention and the router of DeepSeek-V3 by their formulas, for the self-check of conversions.

In all functions, `get` returns a tensor of the Hugging Face model by its name without prefix, and
the input `x` is [prompts, tokens, hidden].
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

Get = Callable[[str], Tensor]


def latent_attention(
    config: Mapping[str, Any],
    get: Get,
    norm: Callable[[str, Tensor], Tensor],
    rotated: Callable[[Tensor, int], Tensor],
    *,
    name: str,
    x: Tensor,
) -> Tensor:
    """Return the output of multi-head latent attention (arXiv 2405.04434, equations 37 to 47),
    [prompts, tokens, hidden]. `rotated(x, heads)` applies RoPE to heads of another order than
    DeepSeek's. In this order, the first elements of all rotated pairs are in the first half of a
    head, and the second elements are in the second half."""
    heads, rank = config["num_attention_heads"], config["kv_lora_rank"]
    plain = config["qk_nope_head_dim"]

    def linear(part: str, x: Tensor) -> Tensor:
        """Apply the linear layer `part`. Only the layers that compress, and the last layer, have
        biases."""
        y = x @ get(f"{name}.{part}.weight").t()
        biased = config.get("attention_bias") and not part.endswith("b_proj")
        return y + get(f"{name}.{part}.bias") if biased else y

    def turned(x: Tensor, heads: int) -> Tensor:
        """Apply RoPE to heads in which the two elements of each rotated pair are neighbours."""
        pairs = x.unflatten(-1, (heads, -1, 2)).movedim(-1, -2).flatten(-2)
        return rotated(pairs.flatten(2), heads).unflatten(-1, (heads, -1)).transpose(1, 2)

    def by_head(x: Tensor) -> tuple[Tensor, ...]:
        """Return two tensors: the first `plain` elements of each head, and the other elements."""
        return x.unflatten(-1, (heads, -1)).transpose(1, 2).tensor_split([plain], -1)

    q = linear("q_b_proj", norm(f"{name}.q_a_layernorm", linear("q_a_proj", x)))
    latent, key = linear("kv_a_proj_with_mqa", x).tensor_split([rank], -1)
    k, v = by_head(linear("kv_b_proj", norm(f"{name}.kv_a_layernorm", latent)))
    q, turning = by_head(q)
    scores = q @ k.mT + turned(turning.transpose(1, 2).flatten(2), heads) @ turned(key, 1).mT
    scores = scores * _scale(config) / math.sqrt(plain + key.shape[-1])
    future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    weights = scores.masked_fill(future, -torch.inf).softmax(-1)
    return linear("o_proj", (weights @ v).transpose(1, 2).flatten(2))


def _scale(config: Mapping[str, Any]) -> float:
    """Return the factor by which YaRN multiplies attention scores; 1 without YaRN."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if rope.get("rope_type", rope.get("type")) != "yarn":
        return 1.0
    mscale = rope.get("mscale_all_dim") or 0.0
    growth: float = 0.1 * mscale * math.log(max(1.0, rope["factor"])) + 1.0
    return growth**2


def expert_shares(config: Mapping[str, Any], get: Get, name: str, x: Tensor) -> Tensor:
    """Return the weight of each expert for each token, [prompts, tokens, experts] (arXiv
    2412.19437, section 2.1.2). Experts that the router does not choose have the weight 0."""
    scores = (x @ get(f"{name}.gate.weight").t()).sigmoid()
    ranked = scores + get(f"{name}.gate.e_score_correction_bias")
    groups = ranked.unflatten(-1, (config["n_group"], -1))
    best = groups.topk(2, -1).values.sum(-1)
    least = best.topk(config["topk_group"], -1).values[..., -1:]
    ranked = groups.masked_fill((best < least)[..., None], -torch.inf).flatten(-2)
    least = ranked.topk(config["num_experts_per_tok"], -1).values[..., -1:]
    shares = scores * (ranked >= least)
    if config.get("norm_topk_prob", True):
        shares = shares / shares.sum(-1, keepdim=True)
    scaled: Tensor = shares * config.get("routed_scaling_factor", 2.5)
    return scaled
