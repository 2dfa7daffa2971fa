"""The way of tokens to the ranks that hold their experts, and back.

The experts of a layer are dealt over the ranks of a group: rank r of e has the r-th part of them,
in the order of their numbers. All ranks of the group compute the same microbatch number of the same
layer at the same time, each with its own tokens. A row travels once for each of its experts.

An expert computes the rows of each rank apart, in the order that they have on that rank, and the
rows of rank after rank. So each product of matrices has the same rows as without expert
parallelism, and gives the same bits.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ptdmpi.comm.communicator import Communicator, OneRank
from ptdmpi.model.experts.routing import Segment, segments


class RowCounts(NamedTuple):
    """The numbers of rows that travel: `leaving[n]` rows of this rank are for expert n, and
    `arriving[r][n]` rows come from rank r and are for expert n of this rank."""

    leaving: list[int]
    arriving: list[list[int]]


class Dispatch(Protocol):
    """The way of a microbatch's rows to their experts. `held` are the segments of this rank's
    experts, numbered from 0, among the rows that it computes: R rows, each with j weights.
    `counts` are the numbers of rows, if ranks have exchanged them."""

    held: Sequence[Segment]
    counts: RowCounts | None

    def rows(self, rows: Tensor) -> Tensor:
        """Return the rows [R, h] that this rank computes, for its tokens [T, h]."""

    def pairs(self, values: Tensor) -> Tensor:
        """Return the values [R, j] of these rows, for those of its tokens and their experts
        [T, k]."""

    def summed(self, results: Tensor) -> Tensor:
        """Return the sums [T, h] over the experts of each token, in the order of their numbers, for
        the results [R, h] of this rank's experts."""

    def pairs_back(self, values: Tensor) -> Tensor:
        """Return the values [T, k] of this rank's tokens and their experts, for those of the rows
        that it computes [R, j]."""


class LocalDispatch:
    """The way of rows whose experts are all on their own rank: j = k weights a row, R = T."""

    counts: RowCounts | None = None

    def __init__(self, held: Sequence[Segment]) -> None:
        self.held = held

    def rows(self, rows: Tensor) -> Tensor:
        """Return the rows as they are."""
        return rows

    def pairs(self, values: Tensor) -> Tensor:
        """Return the values as they are."""
        return values

    def summed(self, results: Tensor) -> Tensor:
        """Return the results: they are sums over the experts already."""
        return results

    def pairs_back(self, values: Tensor) -> Tensor:
        """Return the values as they are."""
        return values


class SentDispatch:
    """The way of rows over a group by all-to-alls with uneven parts: j = 1 weight a row."""

    def __init__(self, group: Communicator, chosen: Tensor, counts: RowCounts) -> None:
        """Store the way of this rank's tokens to their experts `chosen` [T, k]."""
        self.group = group
        self.each = chosen.shape[1]
        self.tokens = chosen.shape[0]
        # the pairs (token, expert), expert after expert
        self.order = chosen.flatten().argsort(stable=True)
        self.counts: RowCounts | None = counts
        self.leaving = counts.leaving
        own = len(self.leaving) // group.size
        self.sent = [sum(self.leaving[at : at + own]) for at in range(0, len(self.leaving), own)]
        self.received = [sum(of_rank) for of_rank in counts.arriving]
        self.held: Sequence[Segment] = _in_turn(counts.arriving, chosen.device)

    def rows(self, rows: Tensor) -> Tensor:
        """Send each row once for each of its experts."""
        return self._there(rows[self.order // self.each])

    def pairs(self, values: Tensor) -> Tensor:
        """Send the value of each pair."""
        return self._there(values.reshape(-1, 1)[self.order])

    def summed(self, results: Tensor) -> Tensor:
        """Send the results back, and add those of each token."""
        back = self._back(results)
        total = back.new_zeros(self.tokens, back.shape[1])
        # an expert has a token at most once, so nothing is added twice at one place
        split = self.order.split(self.leaving)
        for pairs, values in zip(split, back.split(self.leaving), strict=True):
            total.index_add_(0, pairs // self.each, values)
        return total

    def pairs_back(self, values: Tensor) -> Tensor:
        """Send the values back to their pairs."""
        result = values.new_empty(self.tokens * self.each, 1)
        result[self.order] = self._back(values)
        return result.view(self.tokens, self.each)

    def _there(self, rows: Tensor) -> Tensor:
        return self.group.all_to_all(rows, self.sent, self.received)

    def _back(self, rows: Tensor) -> Tensor:
        return self.group.all_to_all(rows, self.received, self.sent)


def _in_turn(arriving: Sequence[Sequence[int]], device: torch.device) -> list[Segment]:
    """Return the segments of rows that arrive from rank after rank, and from each expert after
    expert; `arriving[r][n]` rows are for expert n and come from rank r."""
    found = []
    begin = 0
    for of_rank in arriving:
        for expert, count in enumerate(of_rank):
            if count:
                rows = torch.arange(begin, begin + count, device=device)
                found.append(Segment(expert, rows, rows))
            begin += count
    return found


@dataclass(frozen=True)
class ExpertAxis:
    """The ranks that hold different experts of the same layers, `comm`, and see different
    tokens."""

    comm: Communicator = field(default_factory=OneRank)

    @property
    def size(self) -> int:
        """Return e, the number of ranks over which the experts are dealt."""
        return self.comm.size

    def own(self, experts: int) -> range:
        """Return the numbers of this rank's experts, of `experts` in all."""
        each = experts // self.size
        return range(self.comm.rank * each, (self.comm.rank + 1) * each)

    def dispatch(self, chosen: Tensor, experts: int, counts: RowCounts | None = None) -> Dispatch:
        """Return the way of this rank's tokens to their experts [T, k]. Without `counts` every
        rank calls `dispatch`: the ranks exchange them, and the host waits for them."""
        if self.size == 1:
            return LocalDispatch(segments(chosen, experts))
        return SentDispatch(self.comm, chosen, counts or self._exchanged(chosen, experts))

    def _exchanged(self, chosen: Tensor, experts: int) -> RowCounts:
        """Tell each rank how many rows this rank has for its experts."""
        leaving = chosen.flatten().bincount(minlength=experts)
        arriving = self.comm.all_to_all(leaving).view(self.size, -1)
        return RowCounts(leaving.tolist(), arriving.tolist())
