"""Ring attention. The ranks of the context axis form a ring, and the keys and values of each rank
are sent around the ring from rank to rank. Each rank computes attention of its queries to the keys
that it has at present (Liu et al. 2023, arXiv 2310.01889).

The partial results of a softmax are merged by their maxima and sums of exponentials (Milakov and
Gimelshein 2018, arXiv 1805.02867, algorithm 3), in float32 or wider. The order of merging is fixed.
A rank first uses its own keys, then the keys of the previous rank, and so on. Each rank has two
chunks of keys, and the chunk at later positions comes first.
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
    """The dropout of attention weights for this rank's queries: the hashes of the queries [b,
    heads, queries] (`RandomStream.query_hashes`), and the dropout rate."""

    hashes: Tensor
    rate: float

    @classmethod
    def of(cls, stream: RandomStream, q: Tensor, rate: float) -> "Dropping":
        """Return the dropout of attention weights for the queries q [b, heads, queries, head size],
        from a random stream at this rank's positions."""
        positions = stream.positions.numbers(q.shape[2], q.device)
        return cls(stream.query_hashes(q.shape[1], positions), rate)

    def kept(self, queries: Region, keys: range) -> Tensor:
        """Return the dropout mask for some queries and keys, bool [b, heads, queries, keys]."""
        return kept_keys(self.hashes[queries], keys, self.rate)


@dataclass(frozen=True)
class RingWork:
    """The settings of ring attention: the axis along which keys are sent, the rules that say which
    keys each query of this rank sees, the kernels for matrix products, and the dropout (None for no
    dropout)."""

    axis: ContextAxis
    seen: Sight
    kernels: Kernels
    dropping: Dropping | None = None


def ring_attention(q: Tensor, k: Tensor, v: Tensor, work: RingWork) -> Tensor:
    """Return softmax(q k^T) v for this rank's queries, [b, heads, s / c, head size of the values],
    over the keys and values of all c ranks.

    Queries, keys and values are at this rank's positions, [b, heads, s / c, head size]; keys and
    values may have fewer heads, and values another head size. The gradients of keys and values are
    summed over the ranks, in float32 or wider.
    """
    out: Tensor = _RingAttention.apply(q, k, v, work)
    return out


class _RingTile(NamedTuple):
    """The scores of some queries of this rank and some keys of a received block.

    `queries` and `keys` are indices into the tensors of queries and keys, and `positions` are the
    positions of the keys in the sequence. `scores` are [b, key heads, queries of a group of heads,
    keys]; a group has the query heads that share a key head. `tangents` are tanh(score / cap), of
    the same shape, or None if scores are not capped.
    """

    queries: Region
    keys: Region
    positions: range
    scores: Tensor
    tangents: Tensor | None


class _RingAttention(Function):
    """Ring attention as an autograd Function. The forward saves its inputs, its output, and the
    log-sum-exp of each query's scores. In the backward, keys and values are sent around the ring
    again, and their gradients follow them."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, work: RingWork) -> Tensor:
        queries = _Queries(q, work)
        merged = _Merged(q, v.shape[3], queries.wide)
        for visit in _visits(work.axis, k, v):
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
        for visit in _visits(work.axis, k, v):
            added = visit.zeros(queries.wide)
            for tile in queries.tiles(visit):
                gradients.add(tile, visit, added)
            journey.pass_on(added.block)
        scale = work.seen.scores.scale
        dk, dv = _Pair(journey.end(), k.shape, v.shape)
        return (gradients.dq * scale).to(q.dtype), (dk * scale).to(k.dtype), dv.to(v.dtype), None


class _Pair:
    """Keys and values, or their gradients, in one tensor [elements], `block`, which is sent as a
    whole. `keys` [b, key heads, s / c, head size] and `values`, which may have another head size,
    are views of `block`."""

    def __init__(self, block: Tensor, keys: torch.Size, values: torch.Size) -> None:
        self.block = block
        first = keys.numel()
        self.keys, self.values = block[:first].view(keys), block[first:].view(values)

    def __iter__(self) -> Iterator[Tensor]:
        return iter((self.keys, self.values))


class _Visit(NamedTuple):
    """The keys and values of rank `source`, while they are on this rank."""

    source: int
    pair: _Pair

    @property
    def keys(self) -> Tensor:
        return self.pair.keys

    @property
    def values(self) -> Tensor:
        return self.pair.values

    def zeros(self, dtype: torch.dtype) -> _Pair:
        """Return zeros in the shapes of the keys and values."""
        block = torch.zeros_like(self.pair.block, dtype=dtype)
        return _Pair(block, self.keys.shape, self.values.shape)


def _visits(axis: ContextAxis, k: Tensor, v: Tensor) -> Iterator[_Visit]:
    """Yield the keys and values of every rank, beginning with this rank's own, k and v. If the
    transport (such as NCCL) makes progress during computation, the next keys and values arrive
    while the caller computes."""
    own = _Pair(k.new_empty(k.numel() + v.numel()), k.shape, v.shape)
    own.keys.copy_(k)
    own.values.copy_(v)
    here = own.block
    del own
    for step in range(axis.size):
        following = None
        if step < axis.size - 1:
            following = _pass_on(axis, here)
        yield _Visit((axis.comm.rank - step) % axis.size, _Pair(here, k.shape, v.shape))
        if following is not None:
            here = following.wait()


class _Arriving(NamedTuple):
    """A tensor that this rank is receiving from the previous rank of the ring."""

    tensor: Tensor
    handle: Handle

    def wait(self) -> Tensor:
        """Wait until the tensor has arrived, and return it."""
        self.handle.wait()
        return self.tensor


def _pass_on(axis: ContextAxis, x: Tensor) -> _Arriving:
    """Begin to send `x` to the next rank of the ring, and to receive the tensor of the previous
    rank.

    The exchange is an all-to-all in which each rank sends only to one other rank. Every transport
    supports an all-to-all, and an all-to-all cannot deadlock.
    """
    rank, size = axis.comm.rank, axis.size
    sent = [len(x) * (peer == (rank + 1) % size) for peer in range(size)]
    received = [len(x) * (peer == (rank - 1) % size) for peer in range(size)]
    return _Arriving(*axis.comm.all_to_all_begin(x, sent, received))


class _Journey:
    """The gradients of a block of keys and values, while they are sent around the ring. The
    gradients of a block are sent after the block from rank to rank, and each rank adds its
    contribution. At the end, they arrive at the rank to which the block belongs."""

    def __init__(self, axis: ContextAxis) -> None:
        self._axis = axis
        self._arriving: _Arriving | None = None

    def pass_on(self, added: Tensor) -> None:
        """Add the gradients that arrive from the previous rank to `added`, and send the sum to the
        next rank. In the first call, no gradients arrive yet."""
        if self._arriving is not None:
            added += self._arriving.wait()
        self._arriving = _pass_on(self._axis, added)

    def end(self) -> Tensor:
        """Return the gradients of this rank's own keys and values, after they have arrived from the
        last rank."""
        assert self._arriving is not None, "`pass_on` has sent the gradients"
        return self._arriving.wait()


class _Queries:
    """The scaled queries of this rank, in the wide type in which sums are computed. The class
    computes the scores of these queries with received keys."""

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
        """Yield the scores of this rank's queries with the received keys of `visit`, one tile (some
        queries and some keys) at a time."""
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
        """Yield tiles (some queries and some keys), each with the positions of its keys in the
        sequence. A tile contains only queries that see some of the received keys, and only keys
        that some query sees."""
        size = self._work.axis.size
        length = self._scaled.shape[2] * size
        first, second = Positions(visit.source, size).runs(length)
        for queries, (rows, heads, seen), mask in _query_blocks(self._scaled, self._work.seen):
            # Begin with the later run of positions. Under a causal mask, the first tile of each
            # query then has the key at the query's own position. The query sees this key, so the
            # maximum of its scores is finite.
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
        """Return the columns of `mask` for the keys at `positions`. `mask` has a column for each of
        the keys `seen`, which include the keys at `positions`. Return None if all queries see all
        keys at `positions`."""
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
        """Return a function that applies the dropout of a tile to values with the shape of the
        tile's scores."""
        dropping = self._work.dropping
        if dropping is None:
            return lambda values: values
        kept = dropping.kept(tile.queries, tile.positions).view(tile.scores.shape)
        return lambda values: dropout(values, kept, dropping.rate)


def _query_blocks(q: Tensor, seen: Sight) -> Iterator[tuple[Region, Region, Tensor | None]]:
    """Yield blocks of queries as the function `blocks` does, but with at most QUERY_BLOCK queries
    per block. Without a causal mask, `blocks` yields larger blocks, which are divided here."""
    for queries, keys, mask in blocks(q, seen):
        rows, heads, places = queries
        for first in range(places.start, places.stop, QUERY_BLOCK):
            last = min(first + QUERY_BLOCK, places.stop)
            yield (rows, heads, slice(first, last)), keys, mask


class _Merged:
    """The running result of softmax(scores) v, merged from partial results for blocks of keys.
    `out` [b, heads, queries, size of a head's values] is the sum of exp(score - maximum) v over the
    keys so far; it is not yet divided by the sum of the exponentials."""

    def __init__(self, q: Tensor, size: int, wide: torch.dtype) -> None:
        b, heads, s, _ = q.shape
        # the order in memory is [queries, b, heads, size], because the next operator reads the
        # result in this order
        self.out = q.new_zeros((s, b, heads, size), dtype=wide).permute(1, 2, 0, 3)
        self._maxima = q.new_full((b, heads, s), -torch.inf, dtype=wide)
        self._sums = torch.zeros_like(self._maxima)

    def weights(self, tile: _RingTile) -> Tensor:
        """Update the maxima with a tile's scores, and rescale the merged results to the new maxima.
        Add exp(score - maximum) of the tile's scores to the sums. Return these exponentials, which
        overwrite the scores."""
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
        """Return softmax(scores) v in the type `dtype`, and the log-sum-exp of each query's scores
        [b, heads, queries]."""
        out = self.out.div_(self._sums[..., None]).to(dtype)
        return out, self._sums.log().add_(self._maxima)


class _Gradients:
    """The backward computation of one rank's attention. The gradient of this rank's queries is `dq`
    [b, heads, queries, head size] times the scale of the scores. The method `add` also computes
    this rank's contributions to the gradients of received keys and values."""

    def __init__(self, queries: _Queries, dout: Tensor, out: Tensor, logsumexp: Tensor) -> None:
        self.dq = torch.zeros_like(queries.narrow, dtype=queries.wide)
        self._queries = queries
        self._dout = dout  # the output's gradient, in the type of the queries
        self._logsumexp = logsumexp
        # For each query, the sum of w dw over its attention weights w, where dw is the gradient of
        # w. This sum equals the inner product of the query's output and the output's gradient (Dao
        # et al. 2022, algorithm 4).
        self._means = (dout.to(queries.wide) * out).sum(-1)

    def add(self, tile: _RingTile, visit: _Visit, gradients: _Pair) -> None:
        """Compute the gradients of the queries, keys and values of a tile (some queries and some
        keys). Add the gradients of queries to `dq`, and those of the received keys and values to
        `gradients`."""
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
    """Return `numbers` [b, heads, queries], one number for each query, as a tensor [b, key heads,
    queries of a group of heads, 1] that broadcasts over `scores`."""
    return numbers.reshape(*scores.shape[:-1], 1)
