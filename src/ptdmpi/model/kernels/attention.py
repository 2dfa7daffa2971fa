"""softmax(q k^T) v: which keys a query sees, and the kernel that the device has for it.

Full attention is PyTorch's FlashAttention. Windows and documents are too, in blocks of queries on a
CPU (`blocks`), as packed sequences on a GPU in half types, in wider types by its masked kernel.
What no fused kernel knows, soft caps, is computed by matrix products over blocks of queries
(`products`), with scores in float32 at least; and so is causal attention where that measures faster
(`kernels`). No path keeps scores for the backward pass, unless the way keeps probabilities.
"""

import importlib.util
import inspect
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ptdmpi.model import kernels
from ptdmpi.model.documents import Documents
from ptdmpi.model.kernels import HALF_TYPES, QUERY_BLOCK, product, soft_cap, widened
from ptdmpi.model.kernels.blocks import BlockedAttention, Scores
from ptdmpi.model.kernels.products import ProductAttention, by_key_head, wide_product


def attention(
    q: Tensor, k: Tensor, v: Tensor, scores: Scores, documents: Documents | None = None
) -> Tensor:
    """softmax(scores) v, each position seeing its own document only.

    q and the result are [b, heads, s, head size], k and v have as many heads or a divisor of them
    (grouped queries).
    """
    by_products = _by_products(q, scores)
    if scores.softcap or by_products:
        # a graph has no ways of its own, and is not asked
        settled = kernels.ways(q.device.type, q.dtype) if by_products else kernels.HostWays()
        return ProductAttention.apply(q, k, v, scores, documents, settled)
    grouped = q.shape[1] != k.shape[1]
    limited = documents is not None or scores.window > 0
    if limited and not _in_blocks(q):
        return _attention_at_once(q, k, v, scores, documents)
    q_, k_, v_ = (widened(part) for part in (q, k, v))
    if grouped and not _shares_keys(q):
        (k_, v_), grouped = _for_each_head(q, k_, v_), False
    if limited or (scores.causal and not grouped and _long_on_cpu(q) and not _whole(q)):
        out = BlockedAttention.apply(q_, k_, v_, scores, documents)
    else:
        out = F.scaled_dot_product_attention(
            q_, k_, v_, is_causal=scores.causal, scale=scores.scale, enable_gqa=grouped
        )
    return out.to(q.dtype)


def _by_products(q: Tensor, scores: Scores) -> bool:
    # a graph has no blocks, and is not asked
    return scores.causal and _long_on_cpu(q) and kernels.ways(q.device.type, q.dtype).products


def _shares_keys(q: Tensor) -> bool:
    """Whether the kernel of full attention takes one key for several query heads: a CPU's does, and
    FlashAttention; of what else a GPU has only the one that writes all scores down."""
    return q.device.type == "cpu" or _has_flash(q)


def _has_flash(q: Tensor) -> bool:
    return q.dtype in HALF_TYPES and kernels.has_flash(q.device.type)


def _for_each_head(q: Tensor, *parts: Tensor) -> Sequence[Tensor]:
    """Keys or values [b, key heads, s, d] -> [b, heads, s, d], of those that are shared copies."""
    group = q.shape[1] // parts[0].shape[1]
    return parts if group == 1 else [part.repeat_interleave(group, dim=1) for part in parts]


def _whole(q: Tensor) -> bool:
    return q.shape[2] >= kernels.ways(q.device.type, q.dtype).whole_from


def _in_blocks(q: Tensor) -> bool:
    """Whether queries are taken in blocks: on a CPU, but for a graph, which would have every one of
    them written out."""
    return q.device.type == "cpu" and not torch.compiler.is_compiling()


def _long_on_cpu(q: Tensor) -> bool:
    return _in_blocks(q) and q.shape[2] > QUERY_BLOCK


def hidden_keys(
    length: int, scores: Scores, documents: Documents | None, device: torch.device
) -> Tensor | None:
    """[s, s] or [b, 1, s, s] bool: the keys that a query does not see; None: it sees all."""
    hidden = None
    if scores.causal:
        every = torch.ones(length, length, dtype=torch.bool, device=device)
        hidden = every.triu(1)
        if scores.window:
            hidden |= every.tril(-scores.window)
    if documents is None:
        return hidden
    others = documents.others()
    return others if hidden is None else others.logical_or_(hidden)


def masked_attention(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scores: Scores) -> Tensor:
    """Attention of each query to the keys that `seen` (bool [b, 1, queries, keys]) lets it see."""
    if not scores.softcap:
        # the queries of a group as those of one head: under a mask no fused kernel of a GPU takes
        # fewer key heads than query heads
        out = F.scaled_dot_product_attention(
            widened(by_key_head(q, k)),
            widened(k),
            widened(v),
            attn_mask=seen.repeat(1, 1, q.shape[1] // k.shape[1], 1),
            scale=scores.scale,
        )
        return out.reshape(q.shape).to(q.dtype)
    products = wide_product(by_key_head(q, k), k.transpose(-1, -2))
    capped = soft_cap(products * scores.scale, scores.softcap)
    capped = capped.unflatten(2, (-1, q.shape[2])).masked_fill(~seen[:, :, None], -torch.inf)
    weights = capped.softmax(-1).flatten(2, 3).to(q.dtype)
    return product(weights, v).view(q.shape)


# -- on a GPU, or in a graph -----------------------------------------------------------------------


@cache
def _packed_attention() -> Callable[..., Any] | None:
    """PyTorch's attention of sequences laid end to end; None before it had grouped queries. It
    returns a tensor where, as here, nothing more is asked for."""
    if importlib.util.find_spec("torch.nn.attention.varlen") is None:
        return None
    from torch.nn.attention.varlen import varlen_attn

    known = inspect.signature(varlen_attn).parameters.keys()
    return varlen_attn if {"window_size", "enable_gqa", "scale"} <= known else None


def _attention_at_once(
    q: Tensor, k: Tensor, v: Tensor, scores: Scores, documents: Documents | None
) -> Tensor:
    """FlashAttention of the documents laid end to end, which takes half types on GPUs only; else
    under a mask, under which no fused kernel shares keys."""
    packed_attention = _packed_attention()
    b, _, s, _ = q.shape
    # called by its name, nothing fills up heads of other sizes for it (flash_api.cpp)
    fits = _has_flash(q) and q.shape[3] % 8 == 0 and q.shape[3] <= 256
    if packed_attention is None or q.device.type == "cpu" or not fits:
        hidden = hidden_keys(s, scores, documents, q.device)
        seen = None if hidden is None else ~hidden
        keys, values = _for_each_head(q, k, v)
        return F.scaled_dot_product_attention(q, keys, values, attn_mask=seen, scale=scores.scale)
    if documents is None:
        offsets = torch.arange(0, (b + 1) * s, s, dtype=torch.int32, device=q.device)
        longest = s
    else:
        offsets, longest = documents.offsets, documents.longest
    packed = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))  # [b s, heads, head size]
    # as many keys before a query's own and behind it; -1: all
    window = (scores.window - 1, 0) if scores.causal else (-1, -1)
    out = packed_attention(
        *packed,
        offsets,
        offsets,
        longest,
        longest,
        scale=scores.scale,
        window_size=window,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return out.unflatten(0, (b, s)).transpose(1, 2)
