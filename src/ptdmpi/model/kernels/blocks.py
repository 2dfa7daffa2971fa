"""Attention on a CPU by PyTorch's kernel, applied to blocks of queries. For each block, the kernel
gets only the keys that the block sees. Without blocks, PyTorch's kernel skips hidden keys only in
steps of 512 keys."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import starmap
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from ptdmpi.model.documents import Documents
from ptdmpi.model.kernels.choice import QUERY_BLOCK
from ptdmpi.model.latent.filled import empty_outputs, filled
from ptdmpi.model.sequence.positions import ALL, Positions
from ptdmpi.plan.layer.chunks import WHOLE_RUN

# A part of a tensor [b, heads, positions, head size]: slices of sequences, heads and positions.
Region = tuple[slice, slice, slice]


@dataclass(frozen=True)
class Scores:
    """The rules for attention scores: how products of queries and keys are scaled, and which keys a
    query sees.

    Products are multiplied by `scale`. If `softcap` is not 0, each score x then becomes softcap
    tanh(x / softcap). If `causal` is True, a query sees the keys up to its own position. If
    `window` is not 0, the query sees only the last `window` keys up to its own position.
    """

    scale: float
    causal: bool = True
    window: int = 0
    softcap: float = 0.0


@cache
def _band(
    queries: int, keys: int, window: int, *, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Return a mask [queries, keys] that is added to scores. The last query is at the position of
    the last key. The mask is -inf at keys after a query's position. If `window` is not 0, the mask
    is also -inf at keys that are `window` or more positions before the query. All other elements
    are 0."""
    every = torch.ones(queries, keys, dtype=torch.bool, device=device)
    hidden = every.triu(keys - queries + 1)
    if window:
        hidden |= every.tril(keys - queries - window)
    zeros = torch.zeros(queries, keys, dtype=dtype, device=device)
    return zeros.masked_fill(hidden, -torch.inf)


@dataclass(frozen=True)
class Sight:
    """The rules that say which keys each query sees. The rules are those of `scores`. If sequences
    have several `documents`, a query also sees only keys of its own document. The queries are at
    `positions`, and the keys are at all positions."""

    scores: Scores
    documents: Documents | None = None
    positions: Positions = ALL


class QueryRun(NamedTuple):
    """Consecutive queries at the positions [first, last) of the sequences `rows`. All positions of
    a run are in one document, which has the positions [begin, end). A rank may have queries at only
    some positions. In the rank's tensor of queries, the query at position i has the index i +
    `shift`."""

    rows: slice
    begin: int
    end: int
    first: int
    last: int
    shift: int


def _pieces(length: int, seen: Sight) -> Iterator[QueryRun]:
    """Divide this rank's queries into runs, and yield the runs. The queries of a run have
    consecutive positions and are in one document. Each sequence has `length` positions. `seen` has
    the documents and this rank's positions. Without documents, all sequences are divided at the
    same positions, so each run has queries of all sequences."""
    whole = [(slice(None), 0, length)]
    if seen.documents is not None:
        whole = [(slice(row, row + 1), begin, end) for row, begin, end in seen.documents.pieces]
    runs = list(seen.positions.runs(length))
    for rows, begin, end in whole:
        before = 0
        for run in runs:
            first = max(begin, run.start)
            last = min(end, run.stop)
            if first < last:
                yield QueryRun(
                    rows=rows,
                    begin=begin,
                    end=end,
                    first=first,
                    last=last,
                    shift=before - run.start,
                )
            before += len(run)


def blocks(
    q: Tensor, seen: Sight, block: int = QUERY_BLOCK
) -> Iterator[tuple[Region, Region, Tensor | None]]:
    """Divide the queries q [b, heads, queries, head size] into blocks. Yield three values for each
    block: the region of its queries in q, the region of the keys that the block sees, and the mask
    that is added to the scores. The mask is None if every query of the block sees all these keys.

    Under a causal mask, a block has at most `block` consecutive queries. Without a causal mask, a
    block has all queries of a run (see `QueryRun`).
    """
    every, scores = slice(None), seen.scores
    length = q.shape[2] * seen.positions.parts
    for piece in _pieces(length, seen):
        if not scores.causal:
            rows, shift = piece.rows, piece.shift
            queries = slice(piece.first + shift, piece.last + shift)
            yield (rows, every, queries), (rows, every, slice(piece.begin, piece.end)), None
            continue
        # the mask depends only on the distance between query and key, so the mask of every block is
        # a slice at the lower right corner of one large mask
        band = _band(block, length, scores.window, dtype=q.dtype, device=q.device)
        yield from _causal_blocks(piece, band, scores.window, block)


def _causal_blocks(
    piece: QueryRun, band: Tensor, window: int, block: int
) -> Iterator[tuple[Region, Region, Tensor]]:
    """Divide the run of queries `piece`, which have a causal mask, into blocks of at most `block`
    queries. Yield, for each block, the same three values as `blocks`. Each mask is a slice of the
    mask `band`."""
    rows, every = piece.rows, slice(None)
    for first in range(piece.first, piece.last, block):
        last = min(first + block, piece.last)
        oldest = piece.begin
        if window:
            oldest = max(piece.begin, first - window + 1)
        queries = slice(first + piece.shift, last + piece.shift)
        keys = slice(oldest, last)
        yield (rows, every, queries), (rows, every, keys), band[first - last :, oldest - last :]


class GradientBlock(NamedTuple):
    """A block of queries and the keys for which one call of PyTorch's kernel computes gradients. If
    `is_square` is True, the queries and the keys have the same positions, and the kernel applies
    the causal mask itself. Otherwise `mask` is added to the scores; None means that every query of
    the block sees all these keys."""

    queries: Region
    keys: Region
    mask: Tensor | None
    is_square: bool = False


def _gradient_blocks(q: Tensor, seen: Sight) -> Iterator[GradientBlock]:
    """Divide the queries q [b, heads, queries, head size] into blocks for the backward pass, and
    yield the blocks. A block adds its contributions to the gradients of all keys that it sees. With
    many small blocks, the gradients of the same keys would be read and written many times, so few
    large blocks are faster.

    If a run of consecutive queries does not start at the first position of its document, every
    query of the run sees all keys of the document before the run. One block without a mask has
    these keys. The keys of the run itself are in one block if the run has at least `WHOLE_RUN`
    positions, otherwise in blocks of `QUERY_BLOCK` queries.
    """
    scores = seen.scores
    if not scores.causal or scores.window:
        yield from starmap(GradientBlock, blocks(q, seen))
        return
    every, length = slice(None), q.shape[2] * seen.positions.parts
    for piece in _pieces(length, seen):
        queries = (piece.rows, every, slice(piece.first + piece.shift, piece.last + piece.shift))
        if piece.first > piece.begin:
            yield GradientBlock(queries, (piece.rows, every, slice(piece.begin, piece.first)), None)
        if piece.last - piece.first >= WHOLE_RUN:
            own = (piece.rows, every, slice(piece.first, piece.last))
            yield GradientBlock(queries, own, None, is_square=True)
            continue
        band = _band(QUERY_BLOCK, length, 0, dtype=q.dtype, device=q.device)
        own_blocks = _causal_blocks(piece._replace(begin=piece.first), band, 0, QUERY_BLOCK)
        yield from starmap(GradientBlock, own_blocks)


def by_library(
    q: Tensor, k: Tensor, v: Tensor, seen: Sight, *, block: int = QUERY_BLOCK
) -> tuple[Tensor, list[Tensor]]:
    """Compute attention by PyTorch's CPU kernel, one block of up to `block` queries after the
    other. Return two values. The first value is softmax(scores) v [b, heads, s, head size of the
    values]. The second value is a list with one tensor for each block: the log-sum-exp of the
    scores of each query, [sequences, heads, queries of the block]. If values are smaller than keys,
    the kernel gets values that are filled up with zeros. The keys and values that it gets are
    copies (`_adjacent`)."""
    out, sums = empty_outputs(q, v), []
    k, values = _adjacent(k, filled(v, q.shape[3]))
    for queries, keys, mask in blocks(q, seen, block):
        here, sum_of_exponentials = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q[queries], k[keys], values[keys], attn_mask=mask, scale=seen.scores.scale
        )
        out[queries] = here[..., : v.shape[3]]
        sums.append(sum_of_exponentials)
    return out, sums


def _adjacent(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return copies of keys and values [b, heads, s, head size] in which the positions of a head
    are adjacent in memory. Model layers compute them as [s, b, heads, head size]. The bytes between
    two positions are then usually a multiple of 4096, and the positions replace each other in the
    processor's first cache, whenever the kernel reads them for another block of queries."""
    return k.contiguous(), v.contiguous()


def joined(
    sums: Iterator[Tensor] | list[Tensor],
    q: Tensor,
    seen: Sight,
    block: int = QUERY_BLOCK,
) -> Tensor:
    """Join the tensors `sums` of all blocks of queries to one tensor [b, heads, queries]. Each
    tensor in `sums` has one number, such as a log-sum-exp, for each query of a block. The tensors
    are in the order of `blocks`."""
    whole: Tensor | None = None
    for (queries, _, _), part in zip(blocks(q, seen, block), sums, strict=True):
        if whole is None:
            whole = part.new_empty(q.shape[:3])
        whole[queries] = part
    assert whole is not None, "there is at least one block of queries"
    return whole


class BlockedWork(NamedTuple):
    """The settings for attention in blocks. `seen` has the rules that say which keys each query
    sees, `with_logsumexp` is True if the log-sum-exp is requested, and `block` is the number of
    queries in a block of the forward."""

    seen: Sight
    with_logsumexp: bool
    block: int = QUERY_BLOCK


class BlockedAttention(Function):
    """Attention on a CPU in blocks of queries. The second result is the log-sum-exp if it is
    requested; otherwise it is None.

    For the backward, this function saves its inputs, its result and the log-sum-exp of each query
    [b, heads, s]. PyTorch's kernel without blocks saves the same tensors. If values are smaller
    than keys, the kernel gets values, outputs and gradients that are filled up with zeros
    (`latent.filled`). The filled tensors are not saved.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, work: BlockedWork
    ) -> tuple[Tensor, Tensor | None]:
        seen = work.seen
        out, sums = by_library(q, k, v, seen, block=work.block)
        ctx.seen = seen
        logsumexp = joined(sums, q, seen, work.block)
        ctx.save_for_backward(q, k, v, out, logsumexp)
        if not work.with_logsumexp:
            return out, None
        ctx.mark_non_differentiable(logsumexp)
        return out, logsumexp

    @staticmethod
    def backward(ctx: Any, dout: Tensor, *nothing: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, out, sums = ctx.saved_tensors
        dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        size = v.shape[3]
        k, values = _adjacent(k, filled(v, q.shape[3]))
        for queries, keys, mask, is_square in _gradient_blocks(q, ctx.seen):
            parts = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                filled(dout[queries], q.shape[3]),
                q[queries],
                k[keys],
                values[keys],
                filled(out[queries], q.shape[3]),
                sums[queries].contiguous(),
                0.0,
                is_square,
                attn_mask=mask,
                scale=ctx.seen.scores.scale,
            )
            dq[queries] += parts[0]
            dk[keys] += parts[1]
            dv[keys] += parts[2][..., :size]
            # free these gradients now, because the next block needs as much memory for its own
            # gradients
            del parts
        return dq, dk, dv, None
