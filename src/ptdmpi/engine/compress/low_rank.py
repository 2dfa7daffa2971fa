"""Low-rank compression: each tile (a block of a parameter, see `units`) is treated as a matrix, and
two thin factors of the matrix are sent (PowerSGD: Vogels et al. 2019, arXiv 1905.13727, algorithm
1).

The compressor is linear in the values of the ranks, so the factors of all ranks are summed by an
all-reduce. Each training step does one power iteration, which starts with the second factor of the
previous step.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ptdmpi.comm.communicator import Communicator
from ptdmpi.engine.compress.compressor import Draws


@dataclass(frozen=True)
class LowRank:
    """A compressor of tiles [n, lines, length] to rank at most `rank`: C(x) = P P^T x, where P has
    orthonormal columns, so that ||C(x) - x|| <= ||x||.

    The contraction delta (see `Compressor`) depends on x, and on how far the columns of P are from
    the first singular vectors of x. If P consists of the first singular vectors, delta is at least
    rank / min(lines, length). If x changes slowly from step to step, P approaches the first
    singular vectors of x over the steps. In the first step delta may be 0.
    """

    rank: int
    longest: ClassVar[int] = 2**62  # the whole tile is one matrix, so blocks have no maximum length

    def shrinks(self, lines: int, length: int) -> bool:
        """Return True if the two factors of a tile have fewer numbers than the tile. If not, the
        tile is sent uncompressed."""
        return self.rank * (lines + length) < lines * length

    def start(self, kept: Tensor, draws: Draws) -> Tensor:
        """Return the factor [n, length, rank] from which the power iteration starts. It is the
        transpose of `kept` [n, rank, length], the factor of the previous step. Rows of `kept` that
        are zero, as in the first step, are replaced by random numbers that are the same on all
        ranks."""
        n, rank, length = kept.shape
        random = draws.uniform(rank * length, kept.dtype).view(n, rank, length) - 0.5
        empty = kept.abs().amax(dim=2, keepdim=True) == 0
        return torch.where(empty, random, kept).mT.contiguous()

    def summed(
        self, x: Tensor, second: Tensor, data: Communicator
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return three values: C(x) of this rank, the sum of C(x) over the data axis, and the
        factor [n, length, rank] from which the power iteration of the next step starts. The two
        all-reduces over the data axis together send rank * (lines + length) numbers for each
        tile."""
        first = orthonormal(data.all_reduce(torch.bmm(x, second)))
        mine = torch.bmm(x.mT, first)
        total = data.all_reduce(mine.clone())
        return torch.bmm(first, mine.mT), torch.bmm(first, total.mT), total


def orthonormal(columns: Tensor) -> Tensor:
    """Return orthonormal columns with the same span as `columns` [n, lines, rank], by Gram-Schmidt
    with two passes. A column that depends linearly on earlier columns becomes zero."""
    orthogonal: list[Tensor] = []
    smallest = torch.finfo(columns.dtype).eps * columns.shape[1]
    for column in columns.unbind(dim=2):
        rest = column
        # because of rounding errors, the columns are not orthogonal after a single pass (Giraud et
        # al. 2005)
        for _ in range(2):
            for other in orthogonal:
                rest = rest - (other * rest).sum(dim=1, keepdim=True) * other
        norm = torch.linalg.vector_norm(rest, dim=1, keepdim=True)
        whole = torch.linalg.vector_norm(column, dim=1, keepdim=True)
        orthogonal.append(torch.where(norm > smallest * whole, rest / norm, 0.0))
    return torch.stack(orthogonal, dim=2)
