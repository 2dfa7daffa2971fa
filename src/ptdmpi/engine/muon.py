"""Muon: it updates the layers' matrices by their momentum, made orthogonal (Jordan et al. 2024,
kellerjordan.github.io/posts/muon; Liu et al. 2025, arXiv 2502.16982); AdamW updates the rest.

A matrix is made orthogonal as a whole, so its slices are gathered from the tensor axis first. If
data ranks share the state, one of the ranks that hold parts of a slice first gets the parts of the
others, and sends them their parts of the update.

A parameter of one product contains several matrices if the model's equation has several: query, key
and value, or a gate and the values that it multiplies. Each is made orthogonal by itself, as in
files that have them as separate tensors, and its update does not depend on the assignment of heads
to ranks.
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

# Newton-Schulz iteration: x <- a x + b (x x^T) x + c (x x^T)^2 x. The coefficients make it
# steepest at 0: singular values are between 0.7 and 1.2 after 5 steps (Jordan et al. 2024).
A = 3.4445
B = -4.7750
C = 2.0315
LEAST_NORM = 1e-7  # the least number by which a matrix is divided
RMS = 0.2  # typical root mean square of AdamW's updates (Liu et al. 2025, section 2.2)


class Matrix(NamedTuple):
    """A parameter that is updated as a whole, and the elements of it that this rank holds: `own`.
    The tensors have these elements, flat. `moments` are the momentum, and the weights' moving
    average if there is one. `decay` is the weight decay, `share` the factor of the learning
    rate."""

    own: OwnPart
    master: Tensor
    gradient: Tensor
    moments: Sequence[Tensor]
    decay: float
    share: float

    @property
    def name(self) -> str:
        """Return the logical name of the parameter."""
        return self.own.entry.name


def is_matrix(config: OptimizerConfig, entry: Entry) -> bool:
    """Return True if a parameter is updated as a whole: the matrices of the layers are, tables and
    the head are not (Jordan et al. 2024)."""
    return (
        config.has_matrices
        and entry.name.startswith("layers.")
        and len(entry.declaration.shape) == 2
    )


def names_of_kinds(config: OptimizerConfig, buffer: ParameterBuffer) -> dict[str, frozenset[str]]:
    """Return the kinds of state that only some of a rank's parameters have, each with the names of
    these parameters."""
    if not config.has_matrices:
        return {}
    matrices = frozenset(n for n, entry in buffer.entries.items() if is_matrix(config, entry))
    rest = frozenset(buffer.entries) - matrices
    return {MOMENTUM: matrices, **dict.fromkeys(ADAMW_KEEPS, rest)}


class Muon:
    """The update of matrices whose slices are on the ranks of `tensor`, and the parts of slices on
    the ranks of the buffer's shard group. All of these ranks call it."""

    def __init__(
        self,
        config: OptimizerConfig,
        matrices: Sequence[Matrix],
        buffer: ParameterBuffer,
        tensor: Communicator,
    ) -> None:
        """Prepare the exchanges; `matrices` are those of which this rank holds a part."""
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
        """Change masters and moments; `rate` is the learning rate of the step. The arithmetic is
        that of torch.optim.Muon, bit by bit, but float64 matrices are iterated in float64, not in
        bfloat16."""
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
            # updates overwrite the momentum from which they were computed
            parcels.travel(arriving, leaving)
            for matrix in self.matrices:
                if matrix.name in parcels.away:
                    self._follow(
                        matrix, parcels.away[matrix.name].view(leaving), rate * matrix.share
                    )
                for average in matrix.moments[1:]:
                    average.lerp_(matrix.master, 1 - config.ema_decay)

    def _move(self, matrix: Matrix, arrived: Sequence[Tensor], rate: float) -> None:
        """Apply the orthogonal update to this rank's part, and write the parts of other ranks over
        the momentum in `arrived`."""
        declaration = matrix.own.entry.declaration
        whole = gathered(self._slice(matrix, arrived), declaration, self.tensor)
        for box in matrices_of(declaration):
            update = orthogonal(whole[box.index], self.kernels)
            length = rate * scale(self.config, *box.size)
            for place, own in self._in(box, matrix.own, matrix.master):
                own.add_(update[place.index], alpha=-length)
            self._deal(matrix, box, update, arrived)
            del update  # it must take no memory while the next matrix is iterated

    def _deal(self, matrix: Matrix, box: Box, update: Tensor, arrived: Sequence[Tensor]) -> None:
        """Write the other ranks' parts of the update of the matrix at `box` to their places in
        `arrived`."""
        for part in self.parcels.coming.get(matrix.name, ()):
            for place, theirs in self._in(box, part, part.view(arrived)):
                theirs.copy_(update[place.index])

    def _follow(self, matrix: Matrix, update: Tensor, rate: float) -> None:
        """Apply the update of this rank's part, which the owner of the matrix has sent."""
        for box in matrices_of(matrix.own.entry.declaration):
            length = rate * scale(self.config, *box.size)
            parts = (self._in(box, matrix.own, flat) for flat in (matrix.master, update))
            for (_, own), (_, change) in zip(*parts, strict=True):
                own.add_(change, alpha=-length)

    def _in(self, box: Box, part: OwnPart, flat: Tensor) -> Iterator[tuple[Box, Tensor]]:
        """Yield the pieces of the matrix at `box` that `part` has: the place in the matrix, and its
        view in `flat`."""
        for at, view, _ in part.logical(flat, self.tensor.rank, self.tensor.size):
            common = at.overlap(box)
            if common is not None:
                yield common.relative(box), view[common.relative(at).index]

    def _slice(self, matrix: Matrix, arrived: Sequence[Tensor]) -> Tensor:
        """Return this tensor rank's slice of the matrix to be made orthogonal, [rows, columns]."""
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
        """Return this rank's part of the matrix to be made orthogonal, flat, in the type of the
        iteration."""
        momentum = matrix.moments[0]
        if self.config.nesterov:
            momentum = matrix.gradient.lerp(momentum, self.config.momentum)
        return momentum.to(self.dtype)


def scale(config: OptimizerConfig, rows: int, columns: int) -> float:
    """Return the factor of the learning rate for an orthogonal update. Either the update becomes as
    large as AdamW's, so that AdamW's learning rate and weight decay can be used (Liu et al. 2025,
    equation 4), or the factor is that of Jordan et al. 2024."""
    if config.muon_scale == "original":
        return math.sqrt(max(1, rows / columns))
    return RMS * math.sqrt(max(rows, columns))


def matrices_of(declaration: Declaration) -> Iterator[Box]:
    """Yield the matrices of a parameter, as boxes of it: each part that the tensor axis divides
    separately is one."""
    whole = Box.whole(declaration.shape)
    split = declaration.split
    begin = 0
    if split is None:
        yield whole
        return
    for size in split.parts:
        yield whole.along(split.dim, begin, begin + size)
        begin += size


def gathered(slice_: Tensor, declaration: Declaration, tensor: Communicator) -> Tensor:
    """Return a logical tensor, without its padding, from the slices of all ranks of the tensor
    axis."""
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
    """Return about U V^T of a matrix U S V^T, [rows, columns], in its own type; zero stays zero."""
    x = matrix.mT if matrix.shape[0] > matrix.shape[1] else matrix
    x = x / x.norm().clamp(min=LEAST_NORM)
    for _ in range(STEPS):
        squares = kernels.product(x, x.mT)  # a matrix of the shorter side's length
        squares = _sum(squares, squares, B, C, kernels=kernels)
        x = _sum(squares, x, A, 1.0, kernels=kernels)
    return x.mT if matrix.shape[0] > matrix.shape[1] else x


def _sum(a: Tensor, b: Tensor, beta: float, alpha: float, *, kernels: Kernels) -> Tensor:
    """Return beta b + alpha a b, rounded once to the type of both."""
    if not kernels.widens(b.device.type, b.dtype):
        return torch.addmm(b, a, b, beta=beta, alpha=alpha)
    wide = b.float()
    total = torch.addmm(wide, wide if a is b else a.float(), wide, beta=beta, alpha=alpha)
    del wide  # free it: only the result in its two types takes memory
    return total.to(b.dtype)
