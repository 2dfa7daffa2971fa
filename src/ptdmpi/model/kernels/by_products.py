"""Attention by matrix products over blocks of queries, in which softmax, soft caps and derivatives
are computed by separate operations."""

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import starmap
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from ptdmpi.model.kernels import Kernels
from ptdmpi.model.kernels.blocks import Region, Sight, blocks, by_library, joined
from ptdmpi.model.kernels.choice import AttentionByProducts
from ptdmpi.model.latent.filled import empty_outputs

# The number of scores that are computed at once. In float32 they take 4 MiB, which fit into the
# caches of the processor.
BLOCK_SCORES = 1 << 20


@dataclass(frozen=True)
class ProductWork:
    """The settings for attention by products. `seen` has the rules that say which keys each query
    sees. `how` has the options, such as the block size. `kernels` has the kernels of matrix
    products. `with_logsumexp` is True if the log-sum-exp is requested."""

    seen: Sight
    how: AttentionByProducts
    kernels: Kernels
    with_logsumexp: bool


class Tile(NamedTuple):
    """A part of the scores that is computed at once: a block of queries of some heads, and the keys
    that the block sees. `mask` is added to the scores. It is None if every query of the block sees
    all these keys."""

    queries: Region
    keys: Region
    mask: Tensor | None


class WeightedTile(NamedTuple):
    """A tile with its probabilities (`weights`), [b, key heads, queries of all heads of a group,
    keys]. A group consists of the query heads that share a key head. With a soft cap, `tangent` has
    the values tanh(score / cap), in the same shape; otherwise it is None."""

    queries: Region
    keys: Region
    weights: Tensor
    tangent: Tensor | None


class ProductAttention(Function):
    """Attention by matrix products over blocks of queries.

    The backward pass computes the probabilities of a block again, so that only queries, keys and
    values must be saved (Dao et al. 2022, arXiv 2205.14135, algorithm 4). The derivative of a soft
    cap is 1 - tanh^2. If `how.keeps` is True and there is no soft cap, the probabilities are also
    saved. The results are bitwise equal in both cases. If `how.library_forward` is True and there
    is no soft cap, PyTorch's kernel computes the forward pass.

    Scores are computed in float32 at least, even for 16-bit types, because fused kernels do the
    same. Scores that are rounded to a 16-bit type would make the gradients less exact. All other
    products are in the type of their operands. If requested, the second result is the log-sum-exp
    of each query's scores [b, heads, s], in float32 at least; otherwise it is None.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, work: ProductWork
    ) -> tuple[Tensor, Tensor | None]:
        ctx.work = work
        logsumexp = None
        if work.how.library_forward and not work.seen.scores.softcap:
            ctx.save_for_backward(q, k, v)
            wide_q, wide_k, wide_v = (work.kernels.widened(part) for part in (q, k, v))
            out, sums = by_library(wide_q, wide_k, wide_v, work.seen)
            if work.with_logsumexp:
                logsumexp = joined(sums, q, work.seen)
                ctx.mark_non_differentiable(logsumexp)
            return out.to(q.dtype), logsumexp
        out = empty_outputs(q, v)
        values = v.contiguous()
        kept: list[Tensor] = []
        if work.with_logsumexp:
            wide_type = torch.promote_types(q.dtype, torch.float32)
            logsumexp = torch.empty(q.shape[:3], dtype=wide_type, device=q.device)
            ctx.mark_non_differentiable(logsumexp)
        keeps = work.how.keeps and not work.seen.scores.softcap and ctx.needs_input_grad[0]
        for queries, keys, weights, _ in _weighted(q, k, work, logsumexp):
            here = out[queries]
            here.copy_(work.kernels.product(weights, values[keys]).view(here.shape))
            if keeps:
                kept.append(weights)
            del weights  # free it before the scores of the next tile, unless it is kept
        ctx.save_for_backward(q, k, v, *kept)
        return out, logsumexp

    @staticmethod
    def backward(ctx: Any, dout: Tensor, *nothing: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, *kept = ctx.saved_tensors
        work: ProductWork = ctx.work
        kernels = work.kernels
        scale = work.seen.scores.scale
        wide = torch.promote_types(q.dtype, torch.float32)
        narrow_q, narrow_k, values, dout = (part.contiguous() for part in (q, k, v, dout))
        dq = torch.empty_like(q)
        # every block of queries adds to these gradients, so use a wide type, because a 16-bit type
        # would round the sum after every block
        dk, dv = (torch.zeros(x.shape, dtype=wide, device=x.device) for x in (k, v))
        each: Iterator[WeightedTile] = _weighted(q, k, work)
        if kept:
            tiles = _tiles(q, k, work)
            each = (
                WeightedTile(tile.queries, tile.keys, weights, None)
                for tile, weights in zip(tiles, kept, strict=True)
            )
        for queries, keys, weights, tangent in each:
            key = narrow_k[keys]
            query, dresult = (by_key_head(part[queries], key) for part in (narrow_q, dout))
            dv[keys] += kernels.wide_product(weights.transpose(-1, -2), dresult)
            dweights = kernels.widened(dresult) @ kernels.widened(values[keys]).transpose(-1, -2)
            # the derivative of softmax: w (dw - sum of w dw) in each row
            dscores = torch.ops.aten._softmax_backward_data(
                dweights, weights.to(dweights.dtype), -1, dweights.dtype
            )
            del dweights
            if tangent is not None:
                dscores = tangent.square_().neg_().add_(1.0).mul_(dscores)
            dscores = dscores.to(q.dtype)
            here = dq[queries]
            torch.mul(kernels.product(dscores, key).view(here.shape), scale, out=here)
            dk[keys] += kernels.wide_product(dscores.transpose(-1, -2), query)
            del weights, tangent, dscores  # free them before the scores of the next tile
        return dq, dk.mul_(scale).to(k.dtype), dv.to(v.dtype), None


def _tiles(q: Tensor, k: Tensor, work: ProductWork) -> Iterator[Tile]:
    """Divide the blocks of queries into tiles, and yield the tiles (see `by_heads`)."""
    return by_heads(q, k, starmap(Tile, blocks(q, work.seen, work.how.block)))


def by_heads(q: Tensor, k: Tensor, wholes: Iterable[Tile]) -> Iterator[Tile]:
    """Divide the tiles `wholes`, which have all heads, into smaller tiles. A smaller tile has as
    many key heads as possible with at most BLOCK_SCORES scores. If a single key head has more
    scores, the tile has one key head."""
    group = q.shape[1] // k.shape[1]
    for (rows, _, positions), (_, _, seen), mask in wholes:
        tile = len(range(*rows.indices(len(q)))) * (positions.stop - positions.start)
        tile *= group * (seen.stop - seen.start)
        heads = max(1, BLOCK_SCORES // tile)
        for first in range(0, k.shape[1], heads):
            last = min(first + heads, k.shape[1])
            queries = (rows, slice(first * group, last * group), positions)
            yield Tile(queries, (rows, slice(first, last), seen), mask)


def _weighted(
    q: Tensor, k: Tensor, work: ProductWork, logsumexp: Tensor | None = None
) -> Iterator[WeightedTile]:
    """Yield each tile with its attention probabilities, which are in the type of q. If `logsumexp`
    [b, heads, s] is given, write the log-sum-exp of each query's scores into it."""
    scores = work.seen.scores
    wide = torch.promote_types(q.dtype, torch.float32)
    # convert q and k once for all blocks, and make them contiguous, because products of contiguous
    # tensors are fast
    wide_q, wide_k = (x.to(wide, memory_format=torch.contiguous_format) for x in (q, k))
    narrow = work.how.fpmath and q.dtype == torch.bfloat16
    scale = scores.scale
    # If `narrow` is True, oneDNN may round the operands to bfloat16. Values of q and k are bfloat16
    # numbers, but scaled values would not be, so the products are scaled instead.
    if not narrow:
        wide_q = wide_q * scale
        scale = 1.0
    for queries, keys, mask in _tiles(wide_q, wide_k, work):
        with _rounding_operands(narrow):
            products, tangent = tile_scores(
                wide_q[queries], wide_k[keys], mask, scale=scale, softcap=scores.softcap
            )
        if logsumexp is not None:
            here = logsumexp[queries]
            here.copy_(products.logsumexp(-1).view(here.shape))
        weights = products.softmax(-1).to(q.dtype)
        del products  # free the scores before the caller uses the probabilities
        yield WeightedTile(queries, keys, weights, tangent)
        del weights, tangent


def tile_scores(
    q: Tensor, k: Tensor, mask: Tensor | None, *, scale: float, softcap: float
) -> tuple[Tensor, Tensor | None]:
    """Return the masked scores of a tile, [b, key heads, queries of all heads of a group, keys].
    The second result has the values tanh(score / softcap) if scores are capped; otherwise it is
    None."""
    if not softcap:
        return _products(q, k, mask, scale), None
    tangent = _products(q, k, None, scale).mul_(1.0 / softcap).tanh_()
    scores = tangent * softcap
    if mask is not None:  # add the mask after the cap, because the cap would make -inf finite
        scores.unflatten(2, (-1, len(mask))).add_(mask)
    return scores, tangent


def _products(q: Tensor, k: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Return scale q k^T plus the mask, [b, key heads, queries of all heads of a group, keys]."""
    grouped = by_key_head(q, k)
    keys = k.transpose(-1, -2)
    if mask is None:
        begin = q.new_empty(1)
        counts = 0.0
    else:
        # compute product and mask in one pass
        begin = mask.repeat(grouped.shape[2] // len(mask), 1)
        counts = 1.0
    flat = torch.baddbmm(begin, grouped.flatten(0, 1), keys.flatten(0, 1), beta=counts, alpha=scale)
    return flat.view(*grouped.shape[:3], -1)


@contextlib.contextmanager
def _rounding_operands(wanted: bool) -> Iterator[None]:
    """Return a context in which oneDNN's fpmath mode is "bf16" if `wanted` is True. Torch has had
    this setting since version 2.9.

    In this mode oneDNN may round the operands of float32 products to bfloat16, so that the
    processor's bfloat16 units can multiply them. The rounding does not change operands that are
    exact bfloat16 numbers. The mode applies to the whole process.
    """
    settings: Any = getattr(torch.backends.mkldnn, "matmul", None)
    if settings is None or not wanted:
        yield
        return
    before = settings.fp32_precision
    settings.fp32_precision = "bf16"
    try:
        yield
    finally:
        settings.fp32_precision = before


def by_key_head(q: Tensor, k: Tensor) -> Tensor:
    """Return queries [b, heads, n, head size] in the shape [b, key heads, queries of all heads of a
    group, head size]. A group consists of the query heads that share a key head of k."""
    return q.reshape(q.shape[0], k.shape[1], -1, q.shape[3])
