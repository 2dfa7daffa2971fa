"""Attention on a CPU by matrix products over blocks of queries: softmax, caps and their derivatives
are written out here.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from ptdmpi.model import kernels
from ptdmpi.model.documents import Documents
from ptdmpi.model.kernels import product, widened
from ptdmpi.model.kernels.blocks import Region, Scores, blocks, by_library

# So many scores at once where they are tensors of ours: 4 MiB in float32, which caches hold.
BLOCK_SCORES = 1 << 20

Weighted = tuple[Region, Region, Tensor, Tensor | None]


class ProductAttention(Function):
    """Attention by matrix products over blocks of queries. Their probabilities are computed again
    in the backward pass (Dao et al. 2022, arXiv 2205.14135, algorithm 4, with a cap's derivative
    1 - tanh^2), so that queries, keys and values alone are kept; or they are kept beside these, to
    the same bits, where the way `keeps` them and no cap wants its tangents; or the library's kernel
    goes forward, where that is the way and there is no cap.

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
        ctx.blocks = (scores, documents, settled)
        if settled.library_forward and not scores.softcap:
            ctx.save_for_backward(q, k, v)
            out, _ = by_library(widened(q), widened(k), widened(v), scores, documents)
            return out.to(q.dtype)
        out = torch.empty_like(q)
        values, kept = v.contiguous(), list[Tensor]()
        keeps = settled.keeps and not scores.softcap and ctx.needs_input_grad[0]
        for queries, keys, weights, _ in _weighted(q, k, scores, documents, settled):
            here = out[queries]
            here.copy_(product(weights, values[keys]).view(here.shape))
            if keeps:
                kept.append(weights)
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
        scores, documents, settled = ctx.blocks
        found: Iterator[Weighted] = _weighted(q, k, scores, documents, settled)
        if kept:
            tiles = _tiles(q, k, scores, documents, settled.block)
            found = ((*tile[:2], one, None) for tile, one in zip(tiles, kept, strict=True))
        for queries, keys, weights, tangent in found:
            key = narrow_k[keys]
            query, dresult = (by_key_head(part[queries], key) for part in (narrow_q, dout))
            dv[keys] += wide_product(weights.transpose(-1, -2), dresult)
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
            dk[keys] += wide_product(dscores.transpose(-1, -2), query)
        return dq, dk.mul_(scores.scale).to(k.dtype), dv.to(v.dtype), None, None, None


def _tiles(
    q: Tensor, k: Tensor, scores: Scores, documents: Documents | None, block: int
) -> Iterator[tuple[Region, Region, Tensor | None]]:
    """Blocks of queries of some heads, the keys that these see, and the mask."""
    group = q.shape[1] // k.shape[1]
    for (rows, _, positions), (_, _, seen), mask in blocks(q, scores, documents, block):
        tile = len(range(*rows.indices(len(q)))) * (positions.stop - positions.start)
        tile *= group * (seen.stop - seen.start)
        heads = max(1, BLOCK_SCORES // tile)
        for first in range(0, k.shape[1], heads):
            last = min(first + heads, k.shape[1])
            queries = (rows, slice(first * group, last * group), positions)
            yield queries, (rows, slice(first, last), seen), mask


def _weighted(
    q: Tensor, k: Tensor, scores: Scores, documents: Documents | None, settled: kernels.HostWays
) -> Iterator[Weighted]:
    """Blocks of queries of some heads, the keys that these see, what each key counts, [b, key
    heads, group queries, keys] in the type of q, and the tangents of capped scores."""
    wide = torch.promote_types(q.dtype, torch.float32)
    # once for all blocks, and laid out as products want it
    wide_q, wide_k = (x.to(wide, memory_format=torch.contiguous_format) for x in (q, k))
    narrow = settled.fpmath and q.dtype == torch.bfloat16
    if not narrow:
        wide_q = wide_q * scores.scale
    for queries, keys, mask in _tiles(wide_q, wide_k, scores, documents, settled.block):
        with _rounding_operands() if narrow else contextlib.nullcontext():
            products = _products(
                wide_q[queries],
                wide_k[keys],
                None if scores.softcap else mask,
                scores.scale if narrow else 1.0,  # its operands are numbers of bfloat16
            )
        tangent = None
        if scores.softcap:
            tangent = products.mul_(1.0 / scores.softcap).tanh_()
            products = tangent * scores.softcap
            if mask is not None:
                products.unflatten(2, (-1, len(mask))).add_(mask)
        yield queries, keys, products.softmax(-1).to(q.dtype), tangent


def _products(q: Tensor, k: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """scale q k^T, and the mask: [b, key heads, group queries, keys]."""
    grouped, keys = by_key_head(q, k), k.transpose(-1, -2)
    if mask is None:
        begin, counts = q.new_empty(1), 0.0
    else:
        # product and mask in one pass
        begin, counts = mask.repeat(grouped.shape[2] // len(mask), 1), 1.0
    flat = torch.baddbmm(begin, grouped.flatten(0, 1), keys.flatten(0, 1), beta=counts, alpha=scale)
    return flat.view(*grouped.shape[:3], -1)


@contextlib.contextmanager
def _rounding_operands() -> Iterator[None]:
    """oneDNN's fpmath mode "bf16", which torch has since 2.9: float32 products are oneDNN's, and
    their operands may be rounded for units that multiply bfloat16, which changes nothing where they
    are numbers of that type. Process-wide for as long as it lasts."""
    settings: Any = getattr(torch.backends.mkldnn, "matmul", None)
    if settings is None:
        yield
        return
    before = settings.fp32_precision
    settings.fp32_precision = "bf16"
    try:
        yield
    finally:
        settings.fp32_precision = before


def by_key_head(q: Tensor, k: Tensor) -> Tensor:
    """[b, heads, n, d] -> [b, key heads, queries of all heads of a group, d]."""
    return q.reshape(q.shape[0], k.shape[1], -1, q.shape[3])


def wide_product(a: Tensor, b: Tensor) -> Tensor:
    """a b, batched, in float32 at least."""
    products = widened(a) @ widened(b)
    return products.to(torch.promote_types(products.dtype, torch.float32))
