"""Muon: an optimizer that updates the matrices of the layers by their orthogonalized momentum
(Jordan et al. 2024, kellerjordan.github.io/posts/muon; Liu et al. 2025, arXiv 2502.16982). AdamW
updates all other parameters.

Only a complete matrix can be orthogonalized, so the slices of a matrix are first gathered over the
tensor axis. If the state is sharded over data ranks, each slice is divided into parts, one for each
rank of a shard group. One rank of the group receives the parts of all other ranks, orthogonalizes
the matrix, and sends to each of these ranks its part of the update.

One parameter may contain several matrices of the model's equations: query, key and value, or a gate
and the values that it multiplies. Each of these matrices is orthogonalized separately, and its
update does not depend on the assignment of heads to ranks.
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ptdmpi.base.box import Box
from ptdmpi.comm.communicator import Communicator
from ptdmpi.config import OptimizerConfig
from ptdmpi.config.sections import ADAMW_KEEPS, MOMENTUM
from ptdmpi.engine.parcels import Parcels
from ptdmpi.model.buffer import ParameterBuffer
from ptdmpi.model.flat import OwnPart
from ptdmpi.model.kernels import USUAL, Kernels
from ptdmpi.model.parameters import Declaration, Entry
from ptdmpi.plan.shape.matrices import STEPS, effort

# Coefficients of the Newton-Schulz iteration x <- A x + B (x x^T) x + C (x x^T)^2 x. They make the
# polynomial very steep at 0, so that all singular values are between 0.7 and 1.2 after 5 steps
# (Jordan et al. 2024).
A = 3.4445
B = -4.7750
C = 2.0315
LEAST_NORM = 1e-7  # lower limit of the norm by which a matrix is divided.
RMS = 0.2  # typical root mean square of AdamW's updates (Liu et al. 2025, section 2.2)


class Matrix(NamedTuple):
    """A parameter that Muon updates, or the part of it that this rank has. All tensors are flat,
    and contain only the elements `own` of the parameter. `moments` has the momentum and, if the run
    has one, the moving average of the weights. `decay` is the weight decay. The learning rate is
    multiplied by `share`."""

    own: OwnPart
    master: Tensor
    gradient: Tensor
    moments: Sequence[Tensor]
    decay: float
    share: float

    @property
    def name(self) -> str:
        """Return the logical name of the parameter, which is the same on all ranks."""
        return self.own.entry.name


def is_matrix(config: OptimizerConfig, entry: Entry) -> bool:
    """Return True if Muon updates the parameter `entry`. Muon updates the matrices of the layers,
    but not the embedding tables and the head (Jordan et al. 2024)."""
    return (
        config.has_matrices
        and entry.name.startswith("layers.")
        and len(entry.declaration.shape) == 2
    )


def names_of_kinds(config: OptimizerConfig, buffer: ParameterBuffer) -> dict[str, frozenset[str]]:
    """Return the kinds of optimizer state that only some parameters have, as a dict: kind -> names
    of these parameters. With Muon, the matrices of layers have a momentum, and all other parameters
    have the moments of AdamW. Without Muon the result is empty."""
    if not config.has_matrices:
        return {}
    matrices = frozenset(n for n, entry in buffer.entries.items() if is_matrix(config, entry))
    rest = frozenset(buffer.entries) - matrices
    return {MOMENTUM: matrices, **dict.fromkeys(ADAMW_KEEPS, rest)}


class Muon:
    """Muon's update of all matrices on a group of ranks. Each rank of the axis `tensor` has a slice
    of a matrix, and each rank of a shard group has a part of such a slice. All ranks of `tensor`
    and of the shard group call `step` together."""

    def __init__(
        self,
        config: OptimizerConfig,
        matrices: Sequence[Matrix],
        buffer: ParameterBuffer,
        tensor: Communicator,
    ) -> None:
        """Prepare the exchanges between ranks. `matrices` has each matrix that is completely or
        partly on this rank."""
        self.config = config
        self.matrices = matrices
        self.tensor = tensor
        self.dtype = buffer.precision.iteration
        self.kernels = USUAL
        every = [entry for entry in buffer.entries.values() if is_matrix(config, entry)]
        boxes = {entry.name: matrices_of(entry.declaration) for entry in every}
        costs = {name: effort(box.size for box in some) for name, some in boxes.items()}
        self.parcels = Parcels(buffer, costs)

    def step(self, rate: float) -> None:
        """Update the master weights and the moments; `rate` is the learning rate of the step. The
        result is bitwise equal to torch.optim.Muon, except that float64 matrices are orthogonalized
        in float64, not in bfloat16."""
        config = self.config
        parcels = self.parcels
        with torch.no_grad():
            leaving, arriving = parcels.room(self.dtype)
            for matrix in self.matrices:
                matrix.moments[0].lerp_(matrix.gradient, 1 - config.momentum)
                matrix.master.mul_(1 - rate * matrix.share * matrix.decay)
                if matrix.name in parcels.away:
                    parcels.away[matrix.name].view(leaving).copy_(self._wanted(matrix))
            parcels.travel(leaving, arriving)
            for matrix in self.matrices:
                if matrix.name not in parcels.away:
                    self._move(matrix, arriving, rate * matrix.share)
            # the tensors in `arriving` now contain updates, which have replaced the momenta from
            # which they were computed
            parcels.travel(arriving, leaving)
            for matrix in self.matrices:
                if matrix.name in parcels.away:
                    self._follow(
                        matrix, parcels.away[matrix.name].view(leaving), rate * matrix.share
                    )
                for average in matrix.moments[1:]:
                    average.lerp_(matrix.master, 1 - config.ema_decay)

    def _move(self, matrix: Matrix, arrived: Sequence[Tensor], rate: float) -> None:
        """Orthogonalize the momentum of a matrix, and add the result to this rank's part of the
        matrix. `arrived` has the parts of the momentum that other ranks have sent; overwrite each
        of them with the same part of the result."""
        declaration = matrix.own.entry.declaration
        whole = gathered(self._slice(matrix, arrived), declaration, self.tensor)
        for box in matrices_of(declaration):
            update = orthogonal(whole[box.index], self.kernels)
            length = rate * scale(self.config, *box.size)
            for place, own in self._in(box, matrix.own, matrix.master):
                own.add_(update[place.index], alpha=-length)
            self._deal(matrix, box, update, arrived)
            del update  # free this memory before the next matrix is orthogonalized

    def _deal(self, matrix: Matrix, box: Box, update: Tensor, arrived: Sequence[Tensor]) -> None:
        """Copy parts of the update of one matrix into `arrived`, for the ranks that need these
        parts. The tensors in `arrived` are sent to these ranks later. The matrix is the slice `box`
        of its parameter."""
        for part in self.parcels.coming.get(matrix.name, ()):
            for place, theirs in self._in(box, part, part.view(arrived)):
                theirs.copy_(update[place.index])

    def _follow(self, matrix: Matrix, update: Tensor, rate: float) -> None:
        """Add `update` to this rank's part of a matrix. The rank that orthogonalizes the matrix has
        sent `update`."""
        for box in matrices_of(matrix.own.entry.declaration):
            length = rate * scale(self.config, *box.size)
            parts = (self._in(box, matrix.own, flat) for flat in (matrix.master, update))
            for (_, own), (_, change) in zip(*parts, strict=True):
                own.add_(change, alpha=-length)

    def _in(self, box: Box, part: OwnPart, flat: Tensor) -> Iterator[tuple[Box, Tensor]]:
        """Yield (slice of the matrix, view of its values in `flat`) for all elements of one matrix
        that `part` contains. The matrix is the slice `box` of its parameter."""
        for at, view, _ in part.logical(flat, self.tensor.rank, self.tensor.size):
            common = at.overlap(box)
            if common is not None:
                yield common.relative(box), view[common.relative(at).index]

    def _slice(self, matrix: Matrix, arrived: Sequence[Tensor]) -> Tensor:
        """Return this tensor rank's slice [rows, columns] of the momentum that will be
        orthogonalized, assembled from this rank's part and the parts in `arrived`."""
        own = matrix.own
        entry = matrix.own.entry
        if own.length == entry.elements:
            return self._wanted(matrix).view(entry.shape)
        slice_ = arrived[0].new_empty(entry.elements)
        slice_[own.begin : own.end] = self._wanted(matrix)
        for part in self.parcels.coming[matrix.name]:
            slice_[part.begin : part.end] = part.view(arrived)
        return slice_.view(entry.shape)

    def _wanted(self, matrix: Matrix) -> Tensor:
        """Return this rank's part of the matrix that is orthogonalized: the momentum or Nesterov's
        momentum. The result is a flat tensor in the data type of the Newton-Schulz iteration."""
        momentum = matrix.moments[0]
        if self.config.nesterov:
            momentum = matrix.gradient.lerp(momentum, self.config.momentum)
        return momentum.to(self.dtype)


def scale(config: OptimizerConfig, rows: int, columns: int) -> float:
    """Return the factor by which the learning rate is multiplied for the orthogonal update of a
    matrix [rows, columns]. By default the update is about as large as an update by AdamW, so the
    learning rate and weight decay of AdamW can be used (Liu et al. 2025, equation 4). With
    `muon_scale = "original"` the result is the factor of Jordan et al. 2024."""
    if config.muon_scale == "original":
        return math.sqrt(max(1, rows / columns))
    return RMS * math.sqrt(max(rows, columns))


def matrices_of(declaration: Declaration) -> Iterator[Box]:
    """Yield the slice of each matrix that a parameter contains. A parameter that consists of
    several parts, such as query, key and value, contains one matrix for each part."""
    whole = Box.whole(declaration.shape)
    split = declaration.split
    dim, parts = 0, declaration.parts or declaration.shape[:1]
    if split is not None:
        dim, parts = split.dim, split.parts
    begin = 0
    for size in parts:
        yield whole.along(dim, begin, begin + size)
        begin += size


def gathered(slice_: Tensor, declaration: Declaration, tensor: Communicator) -> Tensor:
    """Gather the slices of a parameter from all ranks of the tensor axis. Return the full
    parameter, without padding."""
    if tensor.size == 1 or declaration.split is None:
        return slice_
    every = tensor.all_gather(slice_[None])  # [t, rows, columns]
    whole = slice_.new_empty(declaration.shape)
    for rank, part in enumerate(every):
        for share in declaration.held(rank, tensor.size):
            if share.counts:
                whole[share.logical.index] = part[share.local.index]
    return whole


def orthogonal(matrix: Tensor, kernels: Kernels = USUAL) -> Tensor:
    """Return an approximation of U V^T for a matrix [rows, columns] with the singular value
    decomposition U S V^T. The result has the data type of the matrix. A zero matrix stays zero."""
    x = matrix.mT if matrix.shape[0] > matrix.shape[1] else matrix
    x = x / x.norm().clamp(min=LEAST_NORM)
    for _ in range(STEPS):
        # `squares` is a square matrix with as many rows as x
        squares = kernels.product(x, x.mT)
        squares = _sum(squares, squares, B, C, kernels=kernels)
        x = _sum(squares, x, A, 1.0, kernels=kernels)
    return x.mT if matrix.shape[0] > matrix.shape[1] else x


def _sum(a: Tensor, b: Tensor, beta: float, alpha: float, *, kernels: Kernels) -> Tensor:
    """Return beta b + alpha a b, rounded once to the type of a and b."""
    if not kernels.widens(b.device.type, b.dtype):
        return torch.addmm(b, a, b, beta=beta, alpha=alpha)
    wide = b.float()
    total = torch.addmm(wide, wide if a is b else a.float(), wide, beta=beta, alpha=alpha)
    del wide  # free the float32 copy of b before the result is converted
    return total.to(b.dtype)
