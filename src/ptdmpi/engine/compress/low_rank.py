"""Low rank: of each tile, a matrix, two thin factors travel (PowerSGD: Vogels et al. 2019, arXiv
1905.13727, algorithm 1).

Its compressor is linear in what the ranks have, so their factors are summed as they are: one power
iteration, started with the factor that the last step has ended with.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ptdmpi.comm.communicator import Communicator
from ptdmpi.engine.compress.compressor import Draws


@dataclass(frozen=True)
class LowRank:
    """Tiles [n, lines, length] of some rank at most: C(x) = P P^T x, the columns of P orthonormal,
    so that ||C(x) - x|| <= ||x||.

    How much less depends on x and on how near P is to its first singular vectors, at which delta is
    at least rank / min(lines, length); for matrices that change slowly it gets there, and for a
    first step delta may be 0.
    """

    rank: int
    longest: ClassVar[int] = 2**62  # a tile is one matrix, however large

    def shrinks(self, lines: int, length: int) -> bool:
        """Whether the factors of a tile have fewer numbers than it has. Others travel whole."""
        return self.rank * (lines + length) < lines * length

    def start(self, kept: Tensor, draws: Draws) -> Tensor:
        """[n, length, rank] to begin with: what was kept [n, rank, length], and where that is zero,
        as at first, random numbers, the same on all ranks."""
        n, rank, length = kept.shape
        random = draws.uniform(rank * length, kept.dtype).view(n, rank, length) - 0.5
        empty = kept.abs().amax(dim=2, keepdim=True) == 0
        return torch.where(empty, random, kept).mT.contiguous()

    def summed(
        self, x: Tensor, second: Tensor, data: Communicator
    ) -> tuple[Tensor, Tensor, Tensor]:
        """C(x) of this rank, the sum over the data axis, and the next `second` factor, [n, length,
        rank]. Two sums over the axis, of rank (lines + length) numbers a tile."""
        first = orthonormal(data.all_reduce(torch.bmm(x, second)))
        mine = torch.bmm(x.mT, first)
        total = data.all_reduce(mine.clone())
        return torch.bmm(first, mine.mT), torch.bmm(first, total.mT), total


def orthonormal(columns: Tensor) -> Tensor:
    """[n, lines, rank] -> orthonormal columns that span the same, by Gram and Schmidt, each twice;
    one that depends on those before becomes zero."""
    orthogonal: list[Tensor] = []
    smallest = torch.finfo(columns.dtype).eps * columns.shape[1]
    for column in columns.unbind(dim=2):
        rest = column
        for _ in range(2):  # once leaves what rounding has left: Giraud et al. 2005
            for other in orthogonal:
                rest = rest - (other * rest).sum(dim=1, keepdim=True) * other
        norm = torch.linalg.vector_norm(rest, dim=1, keepdim=True)
        whole = torch.linalg.vector_norm(column, dim=1, keepdim=True)
        orthogonal.append(torch.where(norm > smallest * whole, rest / norm, 0.0))
    return torch.stack(orthogonal, dim=2)
