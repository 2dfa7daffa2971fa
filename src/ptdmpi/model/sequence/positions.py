"""The positions of a sequence that one rank has.

The code for labels, rotary angles, learned positions, documents, masks, dropout and sequence
parallelism uses a `Positions` object. Only this class determines which positions of a sequence a
rank has.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Positions:
    """The positions of every sequence that one rank has, in ascending order; by default all
    positions.

    If the context axis with c = `size` ranks divides the sequence, the sequence is cut into 2c
    equal chunks, and rank r has the chunks r and 2c - 1 - r. With this zigzag order, causal
    attention takes the same number of operations on every rank (Dubey et al. 2024, arXiv
    2407.21783, section 3.3.2). Sequence parallelism divides a rank's positions again, into `shares`
    equal shares. Outside attention and MLP, a rank of the tensor axis has only the positions of the
    share with the number `share`.
    """

    rank: int = 0
    size: int = 1
    share: int = 0
    shares: int = 1

    def shared(self, share: int, shares: int) -> "Positions":
        """Divide the positions of this object into `shares` equal shares, and return the share with
        the number `share`. The positions must not be divided into shares already."""
        assert self.shares == 1, "the positions are already divided into shares"
        return replace(self, share=share, shares=shares)

    @property
    def parts(self) -> int:
        """Return the number of equal parts into which the sequence is divided. This object
        describes one of the parts."""
        return self.size * self.shares

    @property
    def are_all(self) -> bool:
        """Return True if this object has all positions of the sequence."""
        return self.parts == 1

    def runs(self, length: int) -> Iterator[range]:
        """Yield the positions of this object as runs of consecutive positions, for a sequence of
        `length` positions.

        Raise ValueError if a sequence of `length` positions cannot be cut into equal chunks and
        shares.
        """
        if length % self.parts or (self.size > 1 and length % (2 * self.size)):
            raise ValueError(f"{length} positions cannot be cut into equal parts for {self}")
        chunks = [range(length)]
        if self.size > 1:
            each = length // (2 * self.size)
            numbers = (self.rank, 2 * self.size - 1 - self.rank)
            chunks = [range(number * each, (number + 1) * each) for number in numbers]
        begin = length // self.parts * self.share
        end = begin + length // self.parts
        before = 0  # the number of this object's positions in the earlier chunks
        for chunk in chunks:
            run: range = chunk[max(0, begin - before) : max(0, end - before)]
            before += len(chunk)
            if run:
                yield run

    def of(self, whole: Tensor, dim: int = 0) -> Tensor:
        """Select the positions of this object in the dim `dim` of the tensor `whole`, which has all
        positions. The result is a view if the positions form one run, and otherwise a copy."""
        if self.are_all:
            return whole
        runs = self.runs(whole.shape[dim])
        parts = [whole.narrow(dim, run.start, len(run)) for run in runs]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim)

    def numbers(self, count: int, device: torch.device) -> Tensor:
        """Return the `count` positions of this object as indices into the sequence: int64
        [count]."""
        runs = self.runs(count * self.parts)
        parts = [torch.arange(run.start, run.stop, device=device) for run in runs]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


ALL = Positions()
