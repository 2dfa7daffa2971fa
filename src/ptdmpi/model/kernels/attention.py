"""softmax(q k^T) v: which keys a query sees, and the kernel that the device has for it.

Full attention is PyTorch's FlashAttention. Windows and documents are too, in blocks of queries on a
CPU, as packed sequences on a GPU in half types, in wider types by its masked kernel. What no fused
kernel knows, soft caps, is computed here by matrix products over blocks of queries, with scores in
float32 at least; and so is causal attention where that measures faster (`kernels`). No path keeps
scores for the backward pass.
"""

import importlib.util
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from ptdmpi.model import kernels
from ptdmpi.model.documents import Documents
from ptdmpi.model.kernels import HALF_TYPES, QUERY_BLOCK, product, soft_cap, widened

# So many scores at once where they are tensors of ours: 4 MiB in float32, which caches hold.
BLOCK_SCORES = 1 << 20

Region = tuple[slice, slice, slice]  # rows, heads, positions
Weighted = tuple[Region, Region, Tensor, Tensor | None]


@dataclass(frozen=True)
class Scores:
    """What becomes of the products of queries and keys, and which of them count.

    They are multiplied by `scale` and, unless `softcap` is 0, become softcap tanh(. / softcap).
    `causal`: a query sees itself and what is before it; of that the last `window` keys, unless 0.
    """

    scale: float
    causal: bool = True
    window: int = 0
    softcap: float = 0.0


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
        return _ProductAttention.apply(q, k, v, scores, documents, settled)
    grouped = q.shape[1] != k.shape[1]
    limited = documents is not None or scores.window > 0
    if limited and not _in_blocks(q):
        return _attention_at_once(q, k, v, scores, documents)
    q_, k_, v_ = (widened(part) for part in (q, k, v))
    if grouped and not _shares_keys(q):
        (k_, v_), grouped = _for_each_head(q, k_, v_), False
    if limited or (scores.causal and not grouped and _long_on_cpu(q) and not _whole(q)):
        out = _BlockedAttention.apply(q_, k_, v_, scores, documents)
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
            widened(_by_key_head(q, k)),
            widened(k),
            widened(v),
            attn_mask=seen.repeat(1, 1, q.shape[1] // k.shape[1], 1),
            scale=scores.scale,
        )
        return out.reshape(q.shape).to(q.dtype)
    products = _wide_product(_by_key_head(q, k), k.transpose(-1, -2))
    capped = soft_cap(products * scores.scale, scores.softcap)
    capped = capped.unflatten(2, (-1, q.shape[2])).masked_fill(~seen[:, :, None], -torch.inf)
    weights = capped.softmax(-1).flatten(2, 3).to(q.dtype)
    return product(weights, v).view(q.shape)


def _by_key_head(q: Tensor, k: Tensor) -> Tensor:
    """[b, heads, n, d] -> [b, key heads, queries of all heads of a group, d]."""
    return q.reshape(q.shape[0], k.shape[1], -1, q.shape[3])


def _wide_product(a: Tensor, b: Tensor) -> Tensor:
    """a b, batched, in float32 at least."""
    products = widened(a) @ widened(b)
    return products.to(torch.promote_types(products.dtype, torch.float32))


# -- blocks of queries -----------------------------------------------------------------------------


@cache
def _band(queries: int, keys: int, window: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """-inf above the diagonal that ends in the lower right corner, and from `window` below it:
    [queries, keys], to be added."""
    every = torch.ones(queries, keys, dtype=torch.bool, device=device)
    hidden = every.triu(keys - queries + 1)
    if window:
        hidden |= every.tril(keys - queries - window)
    zeros = torch.zeros(queries, keys, dtype=dtype, device=device)
    return zeros.masked_fill(hidden, -torch.inf)


def _blocks(
    q: Tensor, scores: Scores, documents: Documents | None, block: int = QUERY_BLOCK
) -> Iterator[tuple[Region, Region, Tensor | None]]:
    """Blocks of so many queries of q [b, heads, s, head size], the keys that each sees, and its
    mask."""
    every, seq_length = slice(None), q.shape[2]
    whole = [(every, 0, seq_length)]
    if documents is not None:
        whole = [(slice(row, row + 1), begin, end) for row, begin, end in documents.pieces]
    for rows, begin, end in whole:
        if not scores.causal:
            yield (rows, every, slice(begin, end)), (rows, every, slice(begin, end)), None
            continue
        # the same lower right corner serves every block: only distances count in it
        band = _band(block, seq_length, scores.window, q.dtype, q.device)
        for first in range(begin, end, block):
            last = min(first + block, end)
            oldest = max(begin, first - scores.window + 1) if scores.window else begin
            mask = band[first - last :, oldest - last :]
            yield (rows, every, slice(first, last)), (rows, every, slice(oldest, last)), mask


class _BlockedAttention(Function):
    """Attention on a CPU in blocks of queries; keeps its inputs, its result and a number for each
    row, as the unblocked kernel does.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, scores: Scores, documents: Documents | None
    ) -> Tensor:
        out, sums = torch.empty_like(q), []
        for queries, keys, mask in _blocks(q, scores, documents):
            out[queries], sum_of_exponentials = (
                torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                    q[queries], k[keys], v[keys], attn_mask=mask, scale=scores.scale
                )
            )
            sums.append(sum_of_exponentials)
        ctx.blocks = (scores, documents)
        ctx.save_for_backward(q, k, v, out, *sums)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, *sums = ctx.saved_tensors
        dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        scores, documents = ctx.blocks
        blocks = _blocks(q, scores, documents)
        for (queries, keys, mask), sum_of_exponentials in zip(blocks, sums, strict=True):
            parts = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                dout[queries],
                q[queries],
                k[keys],
                v[keys],
                out[queries],
                sum_of_exponentials,
                0.0,
                False,
                attn_mask=mask,
                scale=scores.scale,
            )
            dq[queries] = parts[0]
            dk[keys] += parts[1]
            dv[keys] += parts[2]
        return dq, dk, dv, None, None


class _ProductAttention(Function):
    """Attention by matrix products over blocks of queries. Their probabilities are computed again
    in the backward pass (Dao et al. 2022, arXiv 2205.14135, algorithm 4, with a cap's derivative
    1 - tanh^2), so that queries, keys and values alone are kept; or they are kept beside these, to
    the same bits, where the way `keeps` them and no cap wants its tangents.

    Scores are products in float32, of half types too: rounded to these, they would make gradients
    less exact than a fused kernel's. All else is multiplied in the type that it has.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scores: Scores,
        documents: Documents | None,
        settled: kernels.HostWays,
    ) -> Tensor:
        out = torch.empty_like(q)
        values, kept = v.contiguous(), list[Tensor]()
        keeps = settled.keeps and not scores.softcap and ctx.needs_input_grad[0]
        for queries, keys, weights, _ in _weighted(q, k, scores, documents, settled.block):
            here = out[queries]
            here.copy_(product(weights, values[keys]).view(here.shape))
            if keeps:
                kept.append(weights)
        ctx.blocks = (scores, documents, settled.block)
        ctx.save_for_backward(q, k, v, *kept)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, *kept = ctx.saved_tensors
        wide = torch.promote_types(q.dtype, torch.float32)
        narrow_q, narrow_k, values, dout = (part.contiguous() for part in (q, k, v, dout))
        dq = torch.empty_like(q)
        # every block of queries adds to them: in a half type each addition would round
        dk, dv = (torch.zeros(k.shape, dtype=wide, device=k.device) for _ in "kv")
        scores, documents, block = ctx.blocks
        found: Iterator[Weighted] = _weighted(q, k, scores, documents, block)
        if kept:
            tiles = _tiles(q, k, scores, documents, block)
            found = ((*tile[:2], one, None) for tile, one in zip(tiles, kept, strict=True))
        for queries, keys, weights, tangent in found:
            key = narrow_k[keys]
            query, dresult = (_by_key_head(part[queries], key) for part in (narrow_q, dout))
            dv[keys] += _wide_product(weights.transpose(-1, -2), dresult)
            dweights = widened(dresult) @ widened(values[keys]).transpose(-1, -2)
            # w (dw - sum of w dw), row by row
            dscores = torch.ops.aten._softmax_backward_data(
                dweights, weights.to(dweights.dtype), -1, dweights.dtype
            )
            if tangent is not None:
                dscores = tangent.square_().neg_().add_(1.0).mul_(dscores)
            dscores = dscores.to(q.dtype)
            here = dq[queries]
            torch.mul(product(dscores, key).view(here.shape), scores.scale, out=here)
            dk[keys] += _wide_product(dscores.transpose(-1, -2), query)
        return dq, dk.mul_(scores.scale).to(k.dtype), dv.to(v.dtype), None, None, None


def _tiles(
    q: Tensor, k: Tensor, scores: Scores, documents: Documents | None, block: int
) -> Iterator[tuple[Region, Region, Tensor | None]]:
    """Blocks of queries of some heads, the keys that these see, and the mask."""
    group = q.shape[1] // k.shape[1]
    for (rows, _, positions), (_, _, seen), mask in _blocks(q, scores, documents, block):
        tile = len(range(*rows.indices(len(q)))) * (positions.stop - positions.start)
        tile *= group * (seen.stop - seen.start)
        heads = max(1, BLOCK_SCORES // tile)
        for first in range(0, k.shape[1], heads):
            last = min(first + heads, k.shape[1])
            queries = (rows, slice(first * group, last * group), positions)
            yield queries, (rows, slice(first, last), seen), mask


def _weighted(
    q: Tensor, k: Tensor, scores: Scores, documents: Documents | None, block: int
) -> Iterator[Weighted]:
    """Blocks of queries of some heads, the keys that these see, what each key counts, [b, key
    heads, group queries, keys] in the type of q, and the tangents of capped scores."""
    wide = torch.promote_types(q.dtype, torch.float32)
    # once for all blocks, and laid out as products want it
    wide_q = q.to(wide, memory_format=torch.contiguous_format) * scores.scale
    wide_k = k.to(wide, memory_format=torch.contiguous_format)
    for queries, keys, mask in _tiles(wide_q, wide_k, scores, documents, block):
        weights, tangent = _weights(wide_q[queries], wide_k[keys], mask, scores.softcap)
        yield queries, keys, weights.to(q.dtype), tangent


def _weights(
    q: Tensor, k: Tensor, mask: Tensor | None, softcap: float
) -> tuple[Tensor, Tensor | None]:
    """The softmax of scores [b, key heads, group queries, keys], whose queries were scaled, and
    their tangents where they are capped."""
    tangent = None
    grouped, keys = _by_key_head(q, k), k.transpose(-1, -2)
    if mask is not None and not softcap and grouped.shape[2] == len(mask):
        # product and mask in one pass
        flat = torch.baddbmm(mask, grouped.flatten(0, 1), keys.flatten(0, 1))
        return flat.softmax(-1).view(*grouped.shape[:3], -1), None
    products = grouped @ keys
    if softcap:
        tangent = products.mul_(1.0 / softcap).tanh_()
        products = tangent * softcap
    if mask is not None:
        products.unflatten(2, (-1, len(mask))).add_(mask)
    return products.softmax(-1), tangent


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
