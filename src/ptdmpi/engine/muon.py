"""Muon: the layers' matrices are updated by their momentum, made orthogonal (Jordan et al. 2024,
kellerjordan.github.io/posts/muon; Liu et al. 2025, arXiv 2502.16982); the rest is AdamW's.

A matrix is made orthogonal as a whole, so its slices are gathered from the tensor axis first. What
one product computes at once is several matrices, if the model's equation has several: query, key
and value, and a gate beside what it gates. Each is orthogonal by itself, as where a file has them
apart, and its update does not depend on how heads are dealt to ranks.
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
from ptdmpi.model.buffer import ParameterBuffer
from ptdmpi.model.parameters import Declaration, Entry
from ptdmpi.plan.shape.matrices import STEPS

# Newton and Schulz's iteration: x <- a x + b (x x^T) x + c (x x^T)^2 x. Chosen so that it is
# steepest at 0: singular values come to between 0.7 and 1.2 in 5 steps (Jordan et al. 2024).
A, B, C = 3.4445, -4.7750, 2.0315
LEAST_NORM = 1e-7  # that a matrix is divided by
RMS = 0.2  # of AdamW's updates, typically (Liu et al. 2025, section 2.2)


class Matrix(NamedTuple):
    """A parameter that is updated as a whole: this rank's slice of it, all of the slice's shape.
    `moments`: the momentum, and the weights' moving average where there is one; by which weight
    decay, and by what share of the learning rate."""

    entry: Entry
    master: Tensor
    gradient: Tensor
    moments: Sequence[Tensor]
    decay: float
    share: float


def is_matrix(config: OptimizerConfig, entry: Entry) -> bool:
    """Whether a parameter is updated as a whole: the matrices of the layers, neither tables nor the
    head (Jordan et al. 2024)."""
    return (
        config.has_matrices
        and entry.name.startswith("layers.")
        and len(entry.declaration.shape) == 2
    )


def names_of_kinds(config: OptimizerConfig, buffer: ParameterBuffer) -> dict[str, frozenset[str]]:
    """The kinds of state that some of a rank's parameters have, each with these."""
    if not config.has_matrices:
        return {}
    matrices = frozenset(n for n, entry in buffer.entries.items() if is_matrix(config, entry))
    rest = frozenset(buffer.entries) - matrices
    return {MOMENTUM: matrices, **dict.fromkeys(ADAMW_KEEPS, rest)}


class Muon:
    """The update of matrices, slices of which stand on the ranks of `tensor`; all of these call it
    with the slices of the same matrices."""

    def __init__(
        self, config: OptimizerConfig, matrices: Sequence[Matrix], tensor: Communicator
    ) -> None:
        self.config, self.matrices, self.tensor = config, matrices, tensor

    def step(self, rate: float) -> None:
        """Change masters and moments; `rate` is the learning rate of the step. The arithmetic is
        that of torch.optim.Muon, to the bit, with float64 in place of bfloat16 for float64."""
        config = self.config
        with torch.no_grad():
            for one in self.matrices:
                momentum = one.moments[0]
                momentum.lerp_(one.gradient, 1 - config.momentum)
                one.master.mul_(1 - rate * one.share * one.decay)
                self._move(one, rate * one.share)
                for average in one.moments[1:]:
                    average.lerp_(one.master, 1 - config.ema_decay)

    def _move(self, one: Matrix, rate: float) -> None:
        """Take the orthogonal update from this rank's slice."""
        declaration = one.entry.declaration
        whole = gathered(self._wanted(one), declaration, self.tensor)
        for box in matrices_of(declaration):
            length = rate * scale(self.config, *box.size)
            self._take(one, box, orthogonal(whole[box.index]), length)

    def _take(self, one: Matrix, box: Box, update: Tensor, length: float) -> None:
        """Take `length` times the update of one box from what this rank has of it."""
        for share in one.entry.declaration.held(self.tensor.rank, self.tensor.size):
            common = share.logical.overlap(box)
            if common is not None:
                own = one.master[common.relative(share.logical).within(share.local).index]
                own.add_(update[common.relative(box).index], alpha=-length)

    def _wanted(self, one: Matrix) -> Tensor:
        """What is to be made orthogonal, in the type of the iteration."""
        momentum = one.moments[0]
        if self.config.nesterov:
            momentum = one.gradient.lerp(momentum, self.config.momentum)
        return momentum if momentum.dtype == torch.float64 else momentum.bfloat16()


def scale(config: OptimizerConfig, rows: int, columns: int) -> float:
    """By how much an orthogonal update is longer than the learning rate: as one of AdamW, whose
    rate and decay then fit (Liu et al. 2025, equation 4), or as in Jordan et al. 2024."""
    if config.muon_scale == "original":
        return math.sqrt(max(1, rows / columns))
    return RMS * math.sqrt(max(rows, columns))


def matrices_of(declaration: Declaration) -> Iterator[Box]:
    """The matrices of a parameter, as boxes of it: what the tensor axis divides each on its own."""
    whole, split, begin = Box.whole(declaration.shape), declaration.split, 0
    if split is None:
        yield whole
        return
    for size in split.parts:
        yield whole.along(split.dim, begin, begin + size)
        begin += size


def gathered(slice_: Tensor, declaration: Declaration, tensor: Communicator) -> Tensor:
    """A logical tensor from the slices of all ranks of the tensor axis, its padding left out."""
    if tensor.size == 1 or declaration.split is None:
        return slice_
    every = tensor.all_gather(slice_[None])  # [t, rows, columns]
    whole = slice_.new_empty(declaration.shape)
    for rank, found in enumerate(every):
        for share in declaration.held(rank, tensor.size):
            if share.counts:
                whole[share.logical.index] = found[share.local.index]
    return whole


def orthogonal(matrix: Tensor) -> Tensor:
    """U S V^T -> about U V^T, [rows, columns], in the matrix' own type; zero stays zero."""
    x = matrix.mT if matrix.shape[0] > matrix.shape[1] else matrix
    x = x / x.norm().clamp(min=LEAST_NORM)
    for _ in range(STEPS):
        squares = x @ x.mT  # of the shorter side
        squares = torch.addmm(squares, squares, squares, beta=B, alpha=C)
        x = torch.addmm(x, squares, x, beta=A)
    return x.mT if matrix.shape[0] > matrix.shape[1] else x
