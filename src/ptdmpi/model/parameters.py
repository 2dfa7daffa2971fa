"""Parameters by logical name.

Each parameter of a layer is declared once with its logical (whole) shape and how the tensor axis
divides it. Names and logical shapes are the same on every rank and in every layout; only the local
slices differ. Where these stand is `ptdmpi.model.buffer`'s matter.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ptdmpi.base.box import Box
from ptdmpi.config.precision import PRECISIONS, NumberType
from ptdmpi.model.low_bit.codes import Packed, rounded
from ptdmpi.plan.layer.low_bit import LowBit
from ptdmpi.plan.layout.grid import axis_named


@dataclass(frozen=True)
class Split:
    """How the tensor axis divides `dim`: each of `parts` (such as q, k, v) on its own.

    A part that t does not divide is padded at its end; the padding belongs to no logical element.
    `most`: into how many shares each part can be divided (a key head is never cut); where t is a
    multiple of that, neighbouring ranks hold copies of one share. None: into t.
    """

    dim: int
    parts: tuple[int, ...]
    most: tuple[int, ...] | None = None

    def shares(self, tensor_size: int) -> tuple[int, ...]:
        """Into how many shares each part is divided."""
        if self.most is None:
            return (tensor_size,) * len(self.parts)
        return tuple(min(tensor_size, shares) for shares in self.most)

    def local_sizes(self, tensor_size: int) -> tuple[int, ...]:
        """What a rank holds of each part, padding included."""
        shares = self.shares(tensor_size)
        return tuple(-(-part // n) for part, n in zip(self.parts, shares, strict=True))


@dataclass(frozen=True)
class HeldShare:
    """A piece of a parameter: its box in the logical tensor, and where that is in the local one.

    `copies` neighbouring ranks of the tensor axis hold it; on the first of them it `counts`.
    """

    logical: Box
    local: Box
    copies: int = 1
    counts: bool = True


@dataclass(frozen=True)
class Declaration:
    """What is known of a parameter besides its name.

    `init` is a standard deviation of a normal distribution, or "zeros" or "ones".
    `apart`: the axes of the grid along which each rank holds other parameters in this one's place,
    such as other experts: no gradient is summed there. Each of them cuts the training state.
    `shared_gradient`: under sequence parallelism each tensor rank sees only its positions, so the
    gradient of this replicated parameter is a part to be summed over the tensor axis.
    `partial_gradient`: it is one always, since each tensor rank sees only its heads. `trains`:
    without it the parameter has no gradient, no master weight and no moments. `low_bit`: in how few
    bits products take it; without training it stands in them.
    """

    shape: tuple[int, ...]
    split: Split | None
    init: float | str
    decay: bool
    apart: tuple[str, ...] = ()
    shared_gradient: bool = False
    partial_gradient: bool = False
    trains: bool = True
    low_bit: LowBit | None = None

    def __post_init__(self) -> None:
        for axis in self.apart:
            if not axis_named(axis).cuts_state:
                raise ValueError(f'"{axis}" does not cut the state: nothing is apart along it')

    @property
    def packed(self) -> bool:
        """Whether it stands in few bits: nothing but products ever takes it, as its values."""
        return self.low_bit is not None and not self.trains

    @property
    def cut_by(self) -> tuple[str, ...]:
        """The axes along which ranks hold other parts of its state: other slices, or, along the
        pipeline and those of `apart`, other parameters. On all others they hold the same."""
        by_split = () if self.split is None else ("tensor",)
        return (*by_split, "shard", "pipeline", *self.apart)

    def partial_over(self, sequence_divided: bool) -> tuple[str, ...]:
        """The axes besides those of the losses on which each rank has seen a part of its gradient.
        `sequence_divided`: the tensor ranks each have their positions."""
        if self.partial_gradient or (self.shared_gradient and sequence_divided):
            return ("tensor",)
        return ()

    def local_shape(self, tensor_size: int) -> tuple[int, ...]:
        """Return the shape of one tensor rank's slice, padding included."""
        if self.split is None:
            return self.shape
        shape = list(self.shape)
        shape[self.split.dim] = sum(self.split.local_sizes(tensor_size))
        return tuple(shape)

    def held(self, tensor_rank: int, tensor_size: int) -> Iterator[HeldShare]:
        """The pieces of the logical tensor that one tensor rank holds; empty ones are left out."""
        whole = Box.whole(self.shape)
        if self.split is None:
            yield HeldShare(whole, whole)
            return
        dim = self.split.dim
        begin = 0
        local_begin = 0
        shares = self.split.shares(tensor_size)
        sizes = self.split.local_sizes(tensor_size)
        for part, count, size in zip(self.split.parts, shares, sizes, strict=True):
            copies = tensor_size // count
            number, copy = divmod(tensor_rank, copies)
            start, stop = (min(part, size * (number + k)) for k in (0, 1))
            if stop > start:
                yield HeldShare(
                    whole.along(dim, begin + start, begin + stop),
                    whole.along(dim, local_begin, local_begin + stop - start),
                    copies,
                    copy == 0,
                )
            begin = begin + part
            local_begin = local_begin + size


class Parameter(nn.Parameter):
    """A local slice of a logical tensor; `main_grad` is where its gradient accumulates.

    While `later` is a list, what would be added goes into the list: the backward is split, and its
    second part adds it. `entry`: where it stands in the flat order, and `second` where its gradient
    stands, if that is kept apart from another use's of the same table. `packed`: what it is, where
    that stands in few bits; then it has a shape and a type, and no values of its own.
    """

    declaration: Declaration
    entry: "Entry"
    second: "Entry | None" = None
    packed: Packed | None = None
    main_grad: Tensor
    later: list[Callable[[], object]] | None = None

    @property
    def operand(self) -> Tensor:
        """What products take of it: itself, or what its few bits say of it, made for one product.
        Gradients are of that, and go to a parameter that trains as they are (the straight-through
        estimator: Bengio et al. 2013, arXiv 1308.3432, section 4)."""
        if self.packed is not None:
            return self.packed.values(self.dtype)
        form = self.declaration.low_bit
        return self if form is None else rounded(self.detach(), form)

    @property
    def puts_off(self) -> bool:
        """Whether what `accumulate` is given is kept for later."""
        return self.later is not None

    def accumulate(self, add: Callable[[Tensor], object]) -> None:
        """Have `add` add a part of the gradient to `main_grad`, at once or later; it keeps what it
        needs for that, and may talk to the tensor axis."""
        if self.later is None:
            add(self.main_grad)
        else:
            self.later.append(partial(add, self.main_grad))


def declare(tensor_size: int, shape: Sequence[int], init: float | str, **options: Any) -> Parameter:
    """A parameter without storage yet. `options` are those of `Declaration`.

    Weight decay applies to matrices only, as in GPT-3 and LLaMA's training.
    """
    options.setdefault("split", None)
    options.setdefault("decay", len(shape) > 1)
    declaration = Declaration(tuple(shape), init=init, **options)
    # "meta" has a shape and no memory: all of a rank stand in one buffer, which is made later
    local = torch.empty(declaration.local_shape(tensor_size), device="meta")
    parameter = Parameter(local)
    parameter.declaration = declaration
    return parameter


@dataclass(frozen=True)
class Entry:
    """One logical parameter of this rank: where its local slice stands in the flat buffers."""

    name: str
    declaration: Declaration
    start: int
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        """The number of elements of the local slice."""
        return math.prod(self.shape)

    def view(self, flat: Tensor) -> Tensor:
        """Return the local slice in a tensor of the flat order."""
        return flat[self.start : self.start + self.elements].view(self.shape)


@dataclass(frozen=True)
class DataTypes:
    """The types of a precision, as torch has them: of the weights and activations (`compute`), of
    masters and gradients (`master`), and of Muon's products (`iteration`)."""

    compute: torch.dtype
    master: torch.dtype
    iteration: torch.dtype = torch.bfloat16


def dtype_of(number: NumberType) -> torch.dtype:
    """Return the type of numbers as torch has it."""
    dtype: torch.dtype = getattr(torch, number.name)
    return dtype


def data_types(precision: str) -> DataTypes:
    """Return the types of the precision that `precision.compute` names."""
    row = PRECISIONS[precision]
    return DataTypes(dtype_of(row.compute), dtype_of(row.master), dtype_of(row.iteration))
