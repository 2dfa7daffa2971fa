"""The documents in the sequences of a microbatch, and the pairs of documents that a preference loss
compares. Tokens attend only to tokens of their own document, and the positions of a document are
counted from 0.

In this module a document is a group of consecutive tokens that attend only to each other. It is one
text of a packed sample, or the padding after the last text.
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

    `numbers` [b, s] has the number of each token's document within its sequence. `positions` [s, b]
    has the position of each token in its document, from 0 on. `pieces` has (sequence, begin, end)
    of all documents, sequence by sequence. `pieces` is on the host, because the host calls the
    kernels of blocked attention for one document at a time. `offsets` int32 [documents + 1] counts
    positions in the concatenation of all sequences. It has the position of the first token of each
    document, and the end of the last document. `longest` is the length of the longest document.
    """

    numbers: Tensor
    positions: Tensor
    pieces: tuple[tuple[int, int, int], ...]
    offsets: Tensor
    longest: int

    @classmethod
    def of(cls, numbers: Tensor) -> "Documents":
        """Return the documents of b sequences, given document numbers [b, s] on the host.
        Consecutive tokens with equal numbers form one document."""
        rows, length = numbers.shape
        begins = torch.ones_like(numbers, dtype=torch.bool)
        begins[:, 1:] = numbers[:, 1:] != numbers[:, :-1]
        indices = torch.arange(length).expand(rows, length)
        # a token is in the last document that begins at or before the token; the cumulative maximum
        # finds the position at which this document begins
        positions = indices - torch.where(begins, indices, 0).cummax(1).values
        flat = [*begins.flatten().nonzero().flatten().tolist(), rows * length]
        pieces = tuple(
            (begin // length, begin % length, begin % length + end - begin)
            for begin, end in pairwise(flat)
        )
        return cls(
            numbers=begins.cumsum(1),
            positions=positions.t().contiguous(),
            pieces=pieces,
            offsets=torch.tensor(flat, dtype=torch.int32),
            longest=max(end - begin for _, begin, end in pieces),
        )

    def each(self, change: Callable[[Tensor], Tensor]) -> "Documents":
        """Return these documents with the function `change` applied to each of their tensors."""
        return replace(
            self,
            numbers=change(self.numbers),
            positions=change(self.positions),
            offsets=change(self.offsets),
        )

    def others(self, positions: Positions = ALL) -> Tensor:
        """Return a bool mask [b, 1, queries, s] for the queries at `positions` and the keys at all
        s positions. An element is True if the query and the key are in different documents."""
        queries = positions.of(self.numbers, dim=1)
        return queries[:, None, :, None] != self.numbers[:, None, None, :]


@dataclass(frozen=True)
class Pairs:
    """The pairs of answers in a microbatch of b sequences of s tokens. In each sequence, document
    2 i has the preferred answer of pair i, and document 2 i + 1 has the other answer.

    `answers` [s, b] has, for each label, the number of the answer that contains it. Pairs are
    counted over all sequences: the preferred answer of pair n has the number 2 n, and the other
    answer has 2 n + 1. The number is -1 for a label with weight 0. `references` [s, b] are the
    log-probabilities of the labels in the reference model. `size` is the number of pairs. All ranks
    of the context axis have the same pairs, so only the rank with the first position of the
    sequences counts the pairs. `counted` is `size` on the rank with the first position, and 0 on
    every other rank.
    """

    answers: Tensor
    references: Tensor
    size: int
    counted: int

    @classmethod
    def of(cls, documents: Tensor, weights: Tensor, references: Tensor) -> "Pairs":
        """Return the pairs of answers of a microbatch. `documents` [b, s] has the number of each
        label's document, from 0 in each sequence. `weights` [b, s] is 0 for labels that are not
        part of an answer, and for all labels of padding sequences. `references` [b, s] has the
        labels' log-probabilities in the reference model."""
        rows = torch.arange(len(documents))[:, None]
        pairs = rows * (int(documents.max()) + 1) + documents // 2
        known = torch.unique(pairs[weights > 0])
        answers = 2 * torch.searchsorted(known, pairs) + documents % 2
        answers = torch.where(weights > 0, answers, -1)
        return cls(answers.t().contiguous(), references.t().contiguous(), len(known), len(known))

    def summed(self, values: Tensor) -> Tensor:
        """Sum the `values` [s, b] of the labels over the tokens of each answer. Return the sums
        [pairs, 2]: for each pair, the sum of the preferred answer and the sum of the other
        answer."""
        numbers = torch.arange(2 * self.size, device=values.device)[:, None, None]
        # index_add is not used, because its order of additions on GPUs changes from run to run
        sums = torch.where(self.answers == numbers, values, 0.0).sum((1, 2))
        return sums.view(self.size, 2)

    def at(self, positions: Positions) -> "Pairs":
        """Return these pairs with only the labels at `positions`. `counted` is 0 unless `positions`
        includes the first position."""
        first = positions.numbers(len(self.answers) // positions.parts, self.answers.device)[0]
        return Pairs(
            positions.of(self.answers),
            positions.of(self.references),
            self.size,
            self.counted if first == 0 else 0,
        )

    def each(self, change: Callable[[Tensor], Tensor]) -> "Pairs":
        """Return these pairs with the function `change` applied to each of their tensors."""
        return replace(self, answers=change(self.answers), references=change(self.references))
