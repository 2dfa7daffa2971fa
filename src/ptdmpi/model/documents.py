"""The documents of a microbatch: attention and positions begin anew in each of them. And the pairs
of documents that a loss of preferences compares.

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


@dataclass(frozen=True)
class Pairs:
    """The pairs of answers in a microbatch of b sequences of s tokens: documents 2 i and 2 i + 1 of
    a row are a preferred answer and another one.

    `answers` [s, b] has the answer of each label, 2 n for the preferred answer of pair n and
    2 n + 1 for the other one; -1 for a label that does not count. `references` [s, b] are the
    log-probabilities of the labels in the reference model. `size` is the number of pairs, and
    `counted` the number of those that this rank of the context axis counts: all or none.
    """

    answers: Tensor
    references: Tensor
    size: int
    counted: int

    @classmethod
    def of(cls, documents: Tensor, weights: Tensor, references: Tensor) -> "Pairs":
        """Return the pairs of documents, whose numbers [b, s] count from 0 in each row. The weights
        [b, s] are 0 for labels that do not count, and for all labels of rows that do not."""
        rows = torch.arange(len(documents))[:, None]
        pairs = rows * (int(documents.max()) + 1) + documents // 2
        known = torch.unique(pairs[weights > 0])
        answers = 2 * torch.searchsorted(known, pairs) + documents % 2
        answers = torch.where(weights > 0, answers, -1)
        return cls(answers.t().contiguous(), references.t().contiguous(), len(known), len(known))

    def summed(self, values: Tensor) -> Tensor:
        """Return the sums of the values [s, b] of labels over each answer, [pairs, 2]."""
        numbers = torch.arange(2 * self.size, device=values.device)[:, None, None]
        # not index_add, whose order of additions changes from run to run on GPUs
        sums = torch.where(self.answers == numbers, values, 0.0).sum((1, 2))
        return sums.view(self.size, 2)

    def at(self, positions: Positions) -> "Pairs":
        """Return the labels at some positions. The rank with the first position counts the
        pairs."""
        first = positions.numbers(len(self.answers) // positions.parts, self.answers.device)[0]
        return Pairs(
            positions.of(self.answers),
            positions.of(self.references),
            self.size,
            self.counted if first == 0 else 0,
        )

    def each(self, change: Callable[[Tensor], Tensor]) -> "Pairs":
        """Return the same pairs with `change` applied to each of their tensors."""
        return replace(self, answers=change(self.answers), references=change(self.references))
