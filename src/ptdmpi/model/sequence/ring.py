"""Ring attention: the keys and values of each rank of the context axis are sent from rank to rank,
and each rank computes attention of its queries to the keys that it has at the time (Liu et al.
2023, arXiv 2310.01889).

The partial results of a softmax are merged by their maxima and sums of exponentials (Milakov and
Gimelshein 2018, arXiv 1805.02867, algorithm 3), in float32 or wider. The order of merging is fixed:
a rank's own keys come first, then the keys of the ranks before it; of each rank, the keys at later
positions come first.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from ptdmpi.comm.communicator import Handle
from ptdmpi.model.kernels import Kernels
from ptdmpi.model.kernels.blocks import Region, Sight, blocks
from ptdmpi.model.kernels.by_products import Tile, by_heads, by_key_head, tile_scores
from ptdmpi.model.kernels.choice import QUERY_BLOCK
from ptdmpi.model.random import RandomStream, dropout, kept_keys
from ptdmpi.model.sequence.context import ContextAxis
from ptdmpi.model.sequence.positions import Positions


@dataclass(frozen=True)
class Dropping:
    """Dropout of the attention weights of some queries [b, heads, s / c]: the `query_hashes` of
    their random stream, and the dropout rate."""

    hashes: Tensor
    rate: float

    @classmethod
    def of(cls, stream: RandomStream, q: Tensor, rate: float) -> "Dropping":
        """Return the dropout of the attention weights of queries q [b, heads, s / c, d], from their
        random stream."""
        positions = stream.positions.numbers(q.shape[2], q.device)
        return cls(stream.query_hashes(q.shape[1], positions), rate)

    def kept(self, queries: Region, keys: range) -> Tensor:
        """Return the dropout mask for some queries and keys, bool [b, heads, queries, keys]."""
        return kept_keys(self.hashes[queries], keys, self.rate)


@dataclass(frozen=True)
class RingWork:
    """The settings of ring attention: the axis along which keys are sent, the keys that each query
    of this rank sees, the kernels for matrix products, and the dropout, if any."""

    axis: ContextAxis
    seen: Sight
    kernels: Kernels
    dropping: Dropping | None = None


def ring_attention(q: Tensor, k: Tensor, v: Tensor, work: RingWork) -> Tensor:
    """Return softmax(q k^T) v, [b, heads, s / c, d], over the keys and values of all ranks.

    Queries, keys and values are at this rank's positions, [b, heads, s / c, d], for c ranks; keys
    and values may have fewer heads. The gradients of keys and values are summed over the axis, in
    float32 or wider.
    """
    out: Tensor = _RingAttention.apply(q, k, v, work)
    return out


class _RingTile(NamedTuple):
    """The scores of some queries of this rank and some keys of a received block.

    `queries` and `keys` are slices of tensors [b, heads, s / c, d], and `positions` are the
    positions of the keys in the sequence. `scores` are [b, key heads, group queries, keys].
    `tangents` are tanh(scores / cap), of the same shape, or None if scores are not capped.
    """

    queries: Region
    keys: Region
    positions: range
    scores: Tensor
    tangents: Tensor | None


class _RingAttention(Function):
    """Ring attention as an autograd Function. The forward saves its inputs, its output, and the
    logarithm of each query's sum of exponentials. In the backward, keys and values are sent around
    the ring again, followed by their gradients."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, work: RingWork) -> Tensor:
        queries = _Queries(q, work)
        merged = _Merged(q, queries.wide)
        for visit in _visits(work.axis, torch.stack((k, v))):
            for tile in queries.tiles(visit):
                weights = queries.dropped(tile)(merged.weights(tile)).to(q.dtype)
                here = merged.out[tile.queries]
                here += work.kernels.wide_product(weights, visit.values[tile.keys]).view(here.shape)
        out, logsumexp = merged.finish(q.dtype)
        ctx.work = work
        ctx.save_for_backward(q, k, v, out, logsumexp)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, out, logsumexp = ctx.saved_tensors
        work: RingWork = ctx.work
        queries = _Queries(q, work)
        gradients = _Gradients(queries, dout, out, logsumexp)
        journey = _Journey(work.axis)
        for visit in _visits(work.axis, torch.stack((k, v))):
            added = torch.zeros_like(visit.block, dtype=queries.wide)
            for tile in queries.tiles(visit):
                gradients.add(tile, visit, added)
            journey.pass_on(added)
        scale = work.seen.scores.scale
        dk, dv = journey.end()
        return (gradients.dq * scale).to(q.dtype), (dk * scale).to(k.dtype), dv.to(v.dtype), None


class _Visit(NamedTuple):
    """The keys and values of rank `source`, [2, b, key heads, s / c, d], while they are on this
    rank."""

    source: int
    block: Tensor

    @property
    def keys(self) -> Tensor:
        return self.block[0]

    @property
    def values(self) -> Tensor:
        return self.block[1]


def _visits(axis: ContextAxis, here: Tensor) -> Iterator[_Visit]:
    """Yield the keys and values of every rank, this rank's own first: those that are `here`. The
    next keys and values arrive while the caller computes, if the transport makes progress during
    computation."""
    for step in range(axis.size):
        following = None
        if step < axis.size - 1:
            following = _pass_on(axis, here)
        yield _Visit((axis.comm.rank - step) % axis.size, here)
        if following is not None:
            here = following.wait()


class _Arriving(NamedTuple):
    """A tensor that is being received from the previous rank of the ring."""

    tensor: Tensor
    handle: Handle

    def wait(self) -> Tensor:
        """Return the tensor when it has arrived."""
        self.handle.wait()
        return self.tensor


def _pass_on(axis: ContextAxis, x: Tensor) -> _Arriving:
    """Begin to send `x` to the next rank of the ring, and to receive the tensor of the previous
    rank.

    The exchange is an all-to-all in which each rank sends to one other rank. Every transport
    supports all-to-all, and it cannot deadlock.
    """
    rank, size = axis.comm.rank, axis.size
    sent = [len(x) * (peer == (rank + 1) % size) for peer in range(size)]
    received = [len(x) * (peer == (rank - 1) % size) for peer in range(size)]
    return _Arriving(*axis.comm.all_to_all_begin(x, sent, received))


class _Journey:
    """The gradients of keys and values while they are sent around the ring. The gradients follow
    their block of keys and values, each rank adds its part, and at the end they arrive at the
    block's own rank."""

    def __init__(self, axis: ContextAxis) -> None:
        self._axis = axis
        self._arriving: _Arriving | None = None

    def pass_on(self, added: Tensor) -> None:
        """Add `added` to the gradients that arrive, if any do, and send the sum to the next
        rank."""
        if self._arriving is not None:
            added += self._arriving.wait()
        self._arriving = _pass_on(self._axis, added)

    def end(self) -> Tensor:
        """Return the gradients of this rank's own keys and values."""
        assert self._arriving is not None, "the gradients have left"
        return self._arriving.wait()


class _Queries:
    """The scaled queries of this rank, in the type in which sums are computed, and their scores
    with received keys."""

    def __init__(self, q: Tensor, work: RingWork) -> None:
        self.wide = torch.promote_types(q.dtype, torch.float32)
        self.narrow = q
        self._work = work
        self._scaled = q.to(self.wide, memory_format=torch.contiguous_format)
        self._scaled = self._scaled * work.seen.scores.scale

    @property
    def kernels(self) -> Kernels:
        """Return the kernels for matrix products."""
        return self._work.kernels

    def tiles(self, visit: _Visit) -> Iterator[_RingTile]:
        """Yield, in tiles, the scores of the queries that see received keys."""
        keys = visit.keys.to(self.wide)
        softcap = self._work.seen.scores.softcap
        for tile, positions in self._places(visit):
            scores, tangents = tile_scores(
                self._scaled[tile.queries], keys[tile.keys], tile.mask, scale=1.0, softcap=softcap
            )
            yield _RingTile(
                queries=tile.queries,
                keys=tile.keys,
                positions=positions,
                scores=scores,
                tangents=tangents,
            )

    def _places(self, visit: _Visit) -> Iterator[tuple[Tile, range]]:
        """Yield tiles, and the positions of their keys in the sequence. The tiles leave out queries
        that see none of the received keys, and keys that no query sees."""
        size = self._work.axis.size
        length = self._scaled.shape[2] * size
        first, second = Positions(visit.source, size).runs(length)
        for queries, (rows, heads, seen), mask in _query_blocks(self._scaled, self._work.seen):
            # the later run comes first, so that each query first sees its own key, and so has a
            # finite maximum
            for run, before in ((second, len(first)), (first, 0)):
                positions = range(max(seen.start, run.start), min(seen.stop, run.stop))
                if not positions:
                    continue
                shift = before - run.start
                keys = slice(positions.start + shift, positions.stop + shift)
                part = self._mask(queries, seen, mask, positions)
                whole = Tile(queries, (rows, heads, keys), part)
                for tile in by_heads(self._scaled, visit.keys, [whole]):
                    yield tile, positions

    def _mask(
        self, queries: Region, seen: slice, mask: Tensor | None, positions: range
    ) -> Tensor | None:
        """Return the part of a mask for the keys at `positions`, which are among the keys `seen`.
        Return None if all queries see all keys at `positions`."""
        if mask is None:
            return None
        count = queries[2].stop - queries[2].start
        window = self._work.seen.scores.window
        # the last key that a causal block sees is at the position of its last query
        from_all = positions.stop <= seen.stop - count + 1
        if from_all and (not window or positions.start >= seen.stop - window):
            return None
        return mask[:, positions.start - seen.start : positions.stop - seen.start]

    def dropped(self, tile: _RingTile) -> Callable[[Tensor], Tensor]:
        """Return the function that applies dropout to values of the shape of a tile's scores."""
        dropping = self._work.dropping
        if dropping is None:
            return lambda values: values
        kept = dropping.kept(tile.queries, tile.positions).view(tile.scores.shape)
        return lambda values: dropout(values, kept, dropping.rate)


def _query_blocks(q: Tensor, seen: Sight) -> Iterator[tuple[Region, Region, Tensor | None]]:
    """Yield the same as `blocks`, but with at most QUERY_BLOCK queries in each block, even where
    queries see all keys."""
    for queries, keys, mask in blocks(q, seen):
        rows, heads, places = queries
        for first in range(places.start, places.stop, QUERY_BLOCK):
            last = min(first + QUERY_BLOCK, places.stop)
            yield (rows, heads, slice(first, last)), keys, mask


class _Merged:
    """The merged partial results of softmax(scores) v. `out` [b, heads, s / c, d] is relative to
    the maximum of each query's scores, and not yet divided by the query's sum of exponentials."""

    def __init__(self, q: Tensor, wide: torch.dtype) -> None:
        b, heads, s, d = q.shape
        # in the memory order [s / c, b, heads, d], in which the next operator reads it
        self.out = q.new_zeros((s, b, heads, d), dtype=wide).permute(1, 2, 0, 3)
        self._maxima = q.new_full((b, heads, s), -torch.inf, dtype=wide)
        self._sums = torch.zeros_like(self._maxima)

    def weights(self, tile: _RingTile) -> Tensor:
        """Return the exponentials of a tile's scores relative to the new maxima; they overwrite the
        scores. Rescale the merged results to the new maxima, and add the exponentials to the
        sums."""
        queries, scores = tile.queries, tile.scores
        before = self._maxima[queries]
        maxima = torch.maximum(before, scores.amax(-1).view(before.shape))
        weights = scores.sub_(_column(maxima, scores)).exp_()
        factors = (before - maxima).exp()
        self._sums[queries].mul_(factors).add_(weights.sum(-1).view(before.shape))
        self.out[queries].mul_(factors[..., None])
        before.copy_(maxima)
        return weights

    def finish(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return softmax(scores) v in the given type, and the logarithms of the sums of
        exponentials [b, heads, s / c]."""
        out = self.out.div_(self._sums[..., None]).to(dtype)
        return out, self._sums.log().add_(self._maxima)


class _Gradients:
    """The gradients of one rank's attention: `dq` [b, heads, s / c, d], the gradient of its queries
    divided by the scale of scores, and this rank's parts of the gradients of received keys and
    values."""

    def __init__(self, queries: _Queries, dout: Tensor, out: Tensor, logsumexp: Tensor) -> None:
        self.dq = torch.zeros_like(dout, dtype=queries.wide)
        self._queries = queries
        self._dout = dout  # dy in the type of the queries
        self._logsumexp = logsumexp
        # sum of w dw over the attention weights w of a query, computed from the query's output (Dao
        # et al. 2022, algorithm 4)
        self._means = (dout.to(queries.wide) * out).sum(-1)

    def add(self, tile: _RingTile, visit: _Visit, gradients: Tensor) -> None:
        """Add the gradients of a tile to `dq`, and to the gradients of the received keys and
        values."""
        queries, product = self._queries, self._queries.kernels.wide_product
        dk, dv = gradients
        key = visit.keys[tile.keys]
        query, dout = (by_key_head(x[tile.queries], key) for x in (queries.narrow, self._dout))
        weights = tile.scores.sub_(_column(self._logsumexp[tile.queries], tile.scores)).exp_()
        dropped = queries.dropped(tile)
        dv[tile.keys] += product(dropped(weights).to(query.dtype).transpose(-1, -2), dout)
        dscores = dropped(product(dout, visit.values[tile.keys].transpose(-1, -2)))
        dscores = weights.mul_(dscores - _column(self._means[tile.queries], dscores))
        if tile.tangents is not None:
            dscores = tile.tangents.square_().neg_().add_(1.0).mul_(dscores)
        dscores = dscores.to(query.dtype)
        here = self.dq[tile.queries]
        here += product(dscores, key).view(here.shape)
        dk[tile.keys] += product(dscores.transpose(-1, -2), query)


def _column(numbers: Tensor, scores: Tensor) -> Tensor:
    """Return one number for each query, [b, heads, queries], as a column [b, key heads, group
    queries, 1] that broadcasts over scores."""
    return numbers.reshape(*scores.shape[:-1], 1)
