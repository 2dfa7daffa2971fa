"""Sparse compressors: they send some elements of each compression block (a part of a parameter),
and all other elements become zero.

Let d be the length of a block, and `ratio` the fraction of its elements that is sent. The product
ratio * d need not be an integer. So floor(ratio * d + u) elements of the block are sent, where u is
a uniform random number in [0, 1) that is the same on all data ranks. The expected number of sent
elements is then exactly ratio * d.
"""

import math
from abc import abstractmethod

import torch
from torch import Tensor

from ptdmpi.engine.compress.compressor import Compressor, Draws
from ptdmpi.engine.compress.packing import join, joined_bytes, part
from ptdmpi.model.low_bit.packing import pack, packed_bytes, unpack
from ptdmpi.plan.shape.codes import SPARSE


class Sparse(Compressor):
    """The base class of compressors that send the elements of a block with the greatest scores.
    Among elements with equal scores, the first ones are sent."""

    def __init__(self, ratio: float) -> None:
        super().__init__(SPARSE)
        self.ratio = ratio

    @abstractmethod
    def scores(self, x: Tensor, draws: Draws) -> Tensor:
        """Return the scores [n, length] of the elements of x, in any data type that can be sorted.
        A block sends its elements with the greatest scores."""

    def counts(self, draws: Draws, length: int) -> Tensor:
        """Return the number of elements that are sent from each block, [n] int64."""
        kept = torch.floor(self.ratio * length + draws.shared())
        return kept.to(torch.int64).clamp_(max=length)

    def count(self, draws: Draws, length: int) -> int:
        """Return the number of sent elements, summed over all blocks. The host computes this number
        without waiting for the device."""
        return int(self.counts(draws.on_host, length).sum())

    def places(self, x: Tensor, draws: Draws) -> tuple[Tensor, Tensor]:
        """Return the rows and the columns of the elements of x [n, length] that are sent, in
        row-major order."""
        length = x.shape[1]
        kept = self.kept(self.scores(x, draws), self.counts(draws, length))
        rows, columns = torch.nonzero_static(kept, size=self.count(draws, length)).unbind(1)
        return rows, columns

    def kept(self, scores: Tensor, counts: Tensor) -> Tensor:
        """Return a bool mask [n, length]. Row i of the mask is True at the `counts[i]` greatest
        numbers in row i of `scores` [n, length]."""
        length = scores.shape[1]
        # no block sends more than `most` elements
        most = min(length, math.floor(self.ratio * length) + 1)
        # use only the values that topk returns, not its indices: torch does not specify which of
        # several equal elements topk chooses
        greatest = scores.topk(most, dim=1).values
        least = greatest.gather(1, (counts - 1).clamp(min=0)[:, None])
        above = scores > least
        level = scores == least
        room = counts[:, None] - above.sum(dim=1, keepdim=True)
        return above | (level & (level.cumsum(dim=1) <= room))

    def delta(self, length: int) -> float:
        """Return delta, the guaranteed contraction (see `Compressor`), for blocks of `length`
        elements."""
        return self.ratio


class TopK(Sparse):
    """A compressor that sends the elements of greatest magnitude, with their indices (Aji and
    Heafield 2017, arXiv 1704.05021). If k of the d elements of a block are sent, delta = k / d
    (Stich et al. 2018, arXiv 1809.07599, lemma A.1). Each number is sent in the type of the
    gradients, and its index in ceil(log2 length) bits. If all elements are sent, no indices are
    sent.
    """

    def scores(self, x: Tensor, draws: Draws) -> Tensor:
        """Return the magnitudes of the elements as their scores, because the elements of greatest
        magnitude are sent."""
        return x.abs()

    def index_bits(self, length: int) -> int:
        """Return the number of bits of an index."""
        return 0 if self.ratio == 1.0 else (length - 1).bit_length()

    def code_bytes(self, draws: Draws, length: int, dtype: torch.dtype) -> int:
        """Return the length in bytes of the code for the blocks in `draws`. Each block has `length`
        numbers."""
        count = self.count(draws, length)
        indices = packed_bytes(count, self.index_bits(length))
        return joined_bytes(count * dtype.itemsize, indices)

    def encode(self, x: Tensor, draws: Draws) -> Tensor:
        """Encode x [n, length] as [code_bytes] uint8: first the elements, then their indices."""
        rows, columns = self.places(x, draws)
        return join(x[rows, columns], pack(columns, self.index_bits(x.shape[1])))

    def decode(self, code: Tensor, draws: Draws, length: int, dtype: torch.dtype) -> Tensor:
        """Return the decoded values, [n, length], of a code that `encode` has returned."""
        counts = self.counts(draws, length)
        count = self.count(draws, length)
        bits = self.index_bits(length)
        values, rest = part(code, count, dtype)
        if self.ratio == 1.0:
            return values.view(-1, length)
        columns = unpack(rest[: packed_bytes(count, bits)], count, bits)
        rows = torch.repeat_interleave(counts, output_size=count)
        decoded = values.new_zeros((len(counts), length))
        decoded[rows, columns] = values
        return decoded


class RandomK(Sparse):
    """A compressor that sends k randomly chosen elements of each block of d elements. The receiver
    computes the same random numbers, so that no index is sent.

    If `unbiased`, the elements are scaled by d / k, and omega = d / k - 1 (Wangni et al. 2018,
    arXiv 1710.09854). If not `unbiased`, the elements are not scaled, and delta = k / d (Stich et
    al. 2018).
    """

    def __init__(self, ratio: float, unbiased: bool) -> None:
        super().__init__(ratio)
        self.unbiased = unbiased

    def scores(self, x: Tensor, draws: Draws) -> Tensor:
        """Return random numbers as scores, so that random elements are sent."""
        return draws.hashes(x.shape[1])

    def code_bytes(self, draws: Draws, length: int, dtype: torch.dtype) -> int:
        """Return the length in bytes of the code for the blocks in `draws`. Each block has `length`
        numbers."""
        return joined_bytes(self.count(draws, length) * dtype.itemsize, 0)

    def encode(self, x: Tensor, draws: Draws) -> Tensor:
        """Encode x [n, length] as [code_bytes] uint8. The code has the sent elements, without
        indices."""
        return join(x[self.places(x, draws)], x.new_zeros(0, dtype=torch.uint8))

    def decode(self, code: Tensor, draws: Draws, length: int, dtype: torch.dtype) -> Tensor:
        """Return the decoded values, [n, length], of a code that `encode` has returned."""
        values, _ = part(code, self.count(draws, length), dtype)
        decoded = values.new_zeros((len(draws.units), length))
        if self.unbiased:
            values = values / self.ratio
        decoded[self.places(decoded, draws)] = values
        return decoded

    def omega(self, length: int) -> float:
        """Return omega, the bound of the relative variance (see `Compressor`), for blocks of
        `length` elements."""
        return 1.0 / self.ratio - 1.0

    def delta(self, length: int) -> float:
        """Return delta, the guaranteed contraction (see `Compressor`), for blocks of `length`
        elements."""
        if self.unbiased:
            return max(0.0, 1.0 - self.omega(length))
        return self.ratio
