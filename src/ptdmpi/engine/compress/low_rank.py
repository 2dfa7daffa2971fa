"""Low rank: two thin factors of each tile, a matrix, are sent (PowerSGD: Vogels et al. 2019, arXiv
1905.13727, algorithm 1).

The compressor is linear in the ranks' values, so their factors are summed directly: one power
iteration, started with the factor with which the last step ended.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ptdmpi.comm.communicator import Communicator
from ptdmpi.engine.compress.compressor import Draws


@dataclass(frozen=True)
class LowRank:
    """A compressor of tiles [n, lines, length] to at most `rank`: C(x) = P P^T x with orthonormal
    columns of P, so that ||C(x) - x|| <= ||x||.

    The contraction depends on x and on the distance of P from the first singular vectors of x. With
    these vectors delta is at least rank / min(lines, length). P approaches them for matrices that
    change slowly; in a first step delta may be 0.
    """

    rank: int
    longest: ClassVar[int] = 2**62  # a tile is one matrix, however large

    def shrinks(self, lines: int, length: int) -> bool:
        """Return True if the factors of a tile have fewer numbers than the tile. Other tiles are
        sent whole."""
        return self.rank * (lines + length) < lines * length

    def start(self, kept: Tensor, draws: Draws) -> Tensor:
        """Return the factor [n, length, rank] to begin with. It is the `kept` one [n, rank,
        length], with random numbers, the same on all ranks, where that is zero, as in the first
        step."""
        n, rank, length = kept.shape
        random = draws.uniform(rank * length, kept.dtype).view(n, rank, length) - 0.5
        empty = kept.abs().amax(dim=2, keepdim=True) == 0
        return torch.where(empty, random, kept).mT.contiguous()

    def summed(
        self, x: Tensor, second: Tensor, data: Communicator
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return C(x) of this rank, the sum over the data axis, and the next `second` factor, [n,
        length, rank]. The data axis sums twice, rank (lines + length) numbers a tile together."""
        first = orthonormal(data.all_reduce(torch.bmm(x, second)))
        mine = torch.bmm(x.mT, first)
        total = data.all_reduce(mine.clone())
        return torch.bmm(first, mine.mT), torch.bmm(first, total.mT), total


def orthonormal(columns: Tensor) -> Tensor:
    """Return orthonormal columns with the same span as `columns` [n, lines, rank], by Gram-Schmidt,
    each done twice. A column that depends on those before it becomes zero."""
    orthogonal: list[Tensor] = []
    smallest = torch.finfo(columns.dtype).eps * columns.shape[1]
    for column in columns.unbind(dim=2):
        rest = column
        for _ in range(2):  # one pass leaves rounding errors: Giraud et al. 2005
            for other in orthogonal:
                rest = rest - (other * rest).sum(dim=1, keepdim=True) * other
        norm = torch.linalg.vector_norm(rest, dim=1, keepdim=True)
        whole = torch.linalg.vector_norm(column, dim=1, keepdim=True)
        orthogonal.append(torch.where(norm > smallest * whole, rest / norm, 0.0))
    return torch.stack(orthogonal, dim=2)
