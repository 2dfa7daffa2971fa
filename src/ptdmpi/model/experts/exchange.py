"""The exchange of tokens between ranks for expert parallelism: tokens are sent to the ranks that
have their experts, and the results are sent back.

The experts of a layer are divided among the e ranks of a group. Rank r has the r-th block of
experts, in the order of their numbers. All ranks of the group compute the same layer for the same
microbatch number at the same time, each rank for its own tokens. The activation of a token is
called a row, and is sent to each expert of the token.

An expert computes the rows of all source ranks (the ranks that have sent the rows) together,
ordered by source rank; rows from the same rank keep their order. So the order of the rows does not
depend on the time at which they arrive.

If the layout allows results with the same bits as without expert parallelism
(`Layout.computes_by_source`), an expert instead computes the rows of each source rank separately,
one source rank after the other. Each matrix product then has the same operands as without expert
parallelism.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ptdmpi.comm.communicator import Communicator, OneRank
from ptdmpi.model.experts.routing import Segment, segments


class RowCounts(NamedTuple):
    """The numbers of rows (activations of one token each) that a rank sends and receives. This rank
    sends `leaving[n]` rows to expert n. Rank r sends `arriving[r][n]` rows to expert n of this
    rank."""

    leaving: list[int]
    arriving: list[list[int]]


class Dispatch(Protocol):
    """The interface for the exchange of a microbatch's rows (activations of tokens) between ranks.
    This rank has T tokens, and each token has k experts. The experts of this rank compute R rows,
    each with j weights: one weight for each expert that computes the row. If rows are sent to the
    ranks of their experts, a row is sent once for each expert, so j = 1; otherwise j = k. `held`
    has segments of rows; all rows of a `Segment` are for the same expert. The numbers of experts in
    `held` count only the experts of this rank, from 0. `counts` has the numbers of rows that ranks
    send to each other, or is None if nothing is sent."""

    held: Sequence[Segment]
    counts: RowCounts | None

    def rows(self, rows: Tensor) -> Tensor:
        """Send each row to the ranks that have its experts. The argument `rows` [T, hidden] has the
        activations of this rank's tokens. Return the rows [R, hidden] that this rank's experts
        compute."""

    def pairs(self, values: Tensor) -> Tensor:
        """Send each value to the rank that has its expert. The argument `values` [T, k] has one
        value, such as a weight, for each token of this rank and each of the token's k experts.
        Return the values [R, j] of the rows that this rank's experts compute."""

    def summed(self, results: Tensor) -> Tensor:
        """Send the results of experts back to the ranks of their tokens. The argument `results` [R,
        hidden] has the results of this rank's experts. Return the sum of the experts' results for
        each of this rank's tokens, [T, hidden]. A token's results are added in ascending order of
        the experts' numbers."""

    def pairs_back(self, values: Tensor) -> Tensor:
        """Send values back to the ranks of their tokens; this is the inverse of `pairs`. The
        argument `values` [R, j] has the values of the rows that this rank's experts compute. Return
        a tensor [T, k] with one value for each token of this rank and each of the token's k
        experts."""


class LocalDispatch:
    """The dispatch without messages, for a rank that has all experts. In the notation of
    `Dispatch`, R = T and j = k: the activation of each token is one row, with the weights of the
    token's k experts."""

    counts: RowCounts | None = None

    def __init__(self, held: Sequence[Segment]) -> None:
        self.held = held

    def rows(self, rows: Tensor) -> Tensor:
        """Return the rows unchanged, because no rows are sent to other ranks."""
        return rows

    def pairs(self, values: Tensor) -> Tensor:
        """Return the values unchanged, because no values are sent."""
        return values

    def summed(self, results: Tensor) -> Tensor:
        """Return the results unchanged, because they are already sums over the experts."""
        return results

    def pairs_back(self, values: Tensor) -> Tensor:
        """Return the values unchanged, because no values are sent."""
        return values


class SentDispatch:
    """The dispatch of rows (activations of one token each) over a group of ranks, by all-to-all
    messages with a different number of rows for each rank. A row is sent once for each expert of
    its token, so it has one weight: j = 1 in the notation of `Dispatch`."""

    def __init__(
        self, group: Communicator, chosen: Tensor, counts: RowCounts, by_source: bool
    ) -> None:
        """Compute which rows this rank sends to each rank. `chosen` [T, k] has the numbers of the k
        experts of each of this rank's T tokens. `counts` has the numbers of rows that this rank
        sends and receives. The attribute `held` has segments of the received rows (see `Dispatch`).
        By default, each expert has one segment. If `by_source` is True, each pair of a source rank
        and an expert has one segment."""
        self.group = group
        self.each = chosen.shape[1]
        self.tokens = chosen.shape[0]
        # the indices of the pairs (token, expert), sorted by expert
        self.order = chosen.flatten().argsort(stable=True)
        self.counts: RowCounts | None = counts
        self.leaving = counts.leaving
        own = len(self.leaving) // group.size
        self.sent = [sum(self.leaving[at : at + own]) for at in range(0, len(self.leaving), own)]
        self.received = [sum(of_rank) for of_rank in counts.arriving]
        divided = _in_turn if by_source else _together
        self.held: Sequence[Segment] = divided(counts.arriving, chosen.device)

    def rows(self, rows: Tensor) -> Tensor:
        """Send the row (the activation) of each token to each of its experts. Return the rows that
        this rank has received, which its experts compute."""
        return self._there(rows[self.order // self.each])

    def pairs(self, values: Tensor) -> Tensor:
        """Send the value of each pair (token, expert) to the rank that has the expert. Return the
        values [R, 1] that this rank has received."""
        return self._there(values.reshape(-1, 1)[self.order])

    def summed(self, results: Tensor) -> Tensor:
        """Send the results back to the ranks that have the tokens. Return the sum of the experts'
        results for each of this rank's tokens, [T, hidden]."""
        back = self._back(results)
        total = back.new_zeros(self.tokens, back.shape[1])
        # an expert gets each token at most once, so each `index_add_` adds at most one value to a
        # row of `total`
        split = self.order.split(self.leaving)
        for pairs, values in zip(split, back.split(self.leaving), strict=True):
            total.index_add_(0, pairs // self.each, values)
        return total

    def pairs_back(self, values: Tensor) -> Tensor:
        """Send the values back to the ranks that have the tokens. Return a tensor [T, k] with one
        value for each token of this rank and each of the token's k experts."""
        result = values.new_empty(self.tokens * self.each, 1)
        result[self.order] = self._back(values)
        return result.view(self.tokens, self.each)

    def _there(self, rows: Tensor) -> Tensor:
        return self.group.all_to_all(rows, self.sent, self.received)

    def _back(self, rows: Tensor) -> Tensor:
        return self.group.all_to_all(rows, self.received, self.sent)


def _in_turn(arriving: Sequence[Sequence[int]], device: torch.device) -> list[Segment]:
    """Return the received rows as segments. Each segment has the rows from one source rank for one
    expert. Segments are ordered by source rank, then by expert. Rank r has sent `arriving[r][n]`
    rows for expert n of this rank."""
    held = []
    begin = 0
    for of_rank in arriving:
        for expert, count in enumerate(of_rank):
            if count:
                rows = torch.arange(begin, begin + count, device=device)
                held.append(Segment(expert, rows, rows))
            begin += count
    return held


def _together(arriving: Sequence[Sequence[int]], device: torch.device) -> list[Segment]:
    """Return the received rows as one segment for each expert that has rows, ordered by expert. The
    rows of a segment are ordered by source rank. Rank r has sent `arriving[r][n]` rows for expert n
    of this rank."""
    counts = torch.tensor(arriving)  # [source ranks, experts of this rank]
    # rows arrive ordered by source rank and then by expert
    experts = torch.arange(counts.shape[1]).repeat(len(counts)).repeat_interleave(counts.flatten())
    # the order is computed on the host, so that a device receives it in one copy
    order = experts.argsort(stable=True).to(device)
    split = order.split(counts.sum(0).tolist())
    return [Segment(expert, rows, rows) for expert, rows in enumerate(split) if len(rows)]


@dataclass(frozen=True)
class ExpertAxis:
    """The group of ranks, `comm`, among which the experts of each layer are divided. These ranks
    also have different tokens. If `whole` is True, the tensor axis does not divide the width of an
    expert, and each tensor rank has different tokens (`tokens.py`). If `by_source` is True, an
    expert computes the tokens of each of these ranks separately (`Layout.computes_by_source`)."""

    comm: Communicator = field(default_factory=OneRank)
    whole: bool = False
    by_source: bool = False

    @property
    def size(self) -> int:
        """Return the number of ranks among which the experts are divided."""
        return self.comm.size

    def own(self, experts: int) -> range:
        """Return the numbers of the experts on this rank. The layer has `experts` experts in
        all."""
        each = experts // self.size
        return range(self.comm.rank * each, (self.comm.rank + 1) * each)

    def dispatch(self, chosen: Tensor, experts: int, counts: RowCounts | None = None) -> Dispatch:
        """Return the dispatch of this rank's T tokens to their `chosen` experts [T, k]. The layer
        has `experts` experts. If `counts` is None, the ranks exchange the counts; then every rank
        must call this method, and the host waits for the exchange."""
        if self.size == 1:
            return LocalDispatch(segments(chosen, experts))
        counts = counts or self._exchanged(chosen, experts)
        return SentDispatch(self.comm, chosen, counts, self.by_source)

    def _exchanged(self, chosen: Tensor, experts: int) -> RowCounts:
        """Exchange the numbers of rows with all ranks of the group. Return the numbers of rows that
        this rank sends and receives. `chosen` [T, k] has the experts of this rank's T tokens; the
        layer has `experts` experts."""
        leaving = chosen.flatten().bincount(minlength=experts)
        arriving = self.comm.all_to_all(leaving).view(self.size, -1)
        return RowCounts(leaving.tolist(), arriving.tolist())
