"""The documents of a microbatch: attention and positions begin anew in each of them.

A document here is a run of tokens that attend only to each other: a text of a packed sample, or the
padding after it.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from ptdmpi.model.sequence.positions import ALL, Positions


@dataclass(frozen=True)
class Documents:
    """The documents of b sequences of s tokens.

    `numbers` [b, s] identify the document of each token within its row. `positions` [s, b] count
    from 0 in each document. `pieces` are (row, begin, end) of all documents, row by row; they are
    on the host, because they select the kernels. `offsets` int32 [documents + 1] are the first
    tokens of the documents, and the end of the last one, if the rows are laid end to end.
    """

    numbers: Tensor
    positions: Tensor
    pieces: tuple[tuple[int, int, int], ...]
    offsets: Tensor
    longest: int

    @classmethod
    def of(cls, numbers: Tensor) -> "Documents":
        """Return the documents of the numbers [b, s], which are on the host; a document is a run of
        one number in a row."""
        rows, length = numbers.shape
        begins = torch.ones_like(numbers, dtype=torch.bool)
        begins[:, 1:] = numbers[:, 1:] != numbers[:, :-1]
        indices = torch.arange(length).expand(rows, length)
        # the greatest beginning so far is that of the document that a token is in
        positions = indices - torch.where(begins, indices, 0).cummax(1).values
        flat = [*begins.flatten().nonzero().flatten().tolist(), rows * length]
        pieces = tuple(
            (begin // length, begin % length, begin % length + end - begin)
            for begin, end in pairwise(flat)
        )
        return cls(
            begins.cumsum(1),
            positions.t().contiguous(),
            pieces,
            torch.tensor(flat, dtype=torch.int32),
            max(end - begin for _, begin, end in pieces),
        )

    def each(self, change: Callable[[Tensor], Tensor]) -> "Documents":
        """Return the same documents with `change` applied to each of their tensors."""
        return replace(
            self,
            numbers=change(self.numbers),
            positions=change(self.positions),
            offsets=change(self.offsets),
        )

    def others(self, positions: Positions = ALL) -> Tensor:
        """Return a mask [b, 1, queries, s], bool, for queries at some positions: True if query and
        key are in different documents."""
        queries = positions.of(self.numbers, dim=1)
        return queries[:, None, :, None] != self.numbers[:, None, None, :]
