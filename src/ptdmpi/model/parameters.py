"""Parameters, their declarations, and their division over ranks.

Each parameter of a layer is declared once, with its logical (unsharded) shape and its division over
the tensor axis. Names and logical shapes are the same on every rank and in every layout; only the
local slices differ. `ptdmpi.model.buffer` allocates the memory of the slices.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ptdmpi.base.box import Box
from ptdmpi.base.errors import InputError
from ptdmpi.config.precision import PRECISIONS, NumberType
from ptdmpi.model.low_bit.codes import Packed, rounded
from ptdmpi.plan.layer.fitting import is_size, is_std
from ptdmpi.plan.layer.low_bit import LowBit
from ptdmpi.plan.layout.grid import SHARD_AXES, TENSOR, TENSOR_AXES, axis_named


@dataclass(frozen=True)
class Split:
    """The division of dim `dim` of a parameter over the t ranks of the tensor axis. This dim
    consists of parts (such as query, key and value), whose sizes are `parts`. Each part is divided
    separately into shares.

    If the number of shares does not divide the size of a part, the part is padded at its end; the
    padding is not part of the logical tensor. `most` is the maximum number of shares of each part.
    For keys, for example, it is the number of key heads, because a head is never divided between
    ranks. If t is larger than `most`, neighbouring ranks have copies of the same share. If `most`
    is None, each part has t shares.
    """

    dim: int
    parts: tuple[int, ...]
    most: tuple[int, ...] | None = None

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Return True if the parts divide a dim of a parameter of this shape."""
        if not 0 <= self.dim < len(shape) or sum(self.parts) != shape[self.dim]:
            return False
        return self.most is None or len(self.most) == len(self.parts)

    @classmethod
    def of_one(cls, dim: int, size: int, most: int | None = None) -> "Split":
        """Return the division of the dim `dim`, which is a single part of size `size`, into at most
        `most` shares."""
        if most is None:
            return cls(dim, (size,))
        return cls(dim, (size,), (most,))

    def shares(self, tensor_size: int) -> tuple[int, ...]:
        """Return the number of shares of each part on `tensor_size` tensor ranks."""
        if self.most is None:
            return (tensor_size,) * len(self.parts)
        return tuple(min(tensor_size, shares) for shares in self.most)

    def local_sizes(self, tensor_size: int) -> tuple[int, ...]:
        """Return the size of each part on one of `tensor_size` tensor ranks, including padding."""
        shares = self.shares(tensor_size)
        return tuple(-(-part // n) for part, n in zip(self.parts, shares, strict=True))


@dataclass(frozen=True)
class HeldShare:
    """A share of a parameter that one rank has: its slice of the logical (undivided) parameter
    (`logical`), and its slice of the rank's local tensor (`local`).

    `copies` is the number of neighbouring tensor ranks that have this share. `counts` is True only
    on the first of these ranks, so that norms and checkpoints include the share only once.
    """

    logical: Box
    local: Box
    copies: int = 1
    counts: bool = True


@dataclass(frozen=True)
class Declaration:
    """The properties of a parameter, except its name.

    `shape` is the logical (undivided) shape. `split` is the division over the tensor axis; None
    means that every tensor rank has the full parameter. `init` is the standard deviation of a
    normal distribution, or "zeros" or "ones". If `decay` is True, weight decay applies. `apart` has
    the axes of the grid along which ranks have different parameters with this declaration, such as
    different experts; gradients are not summed over these axes. `rows_over` names groups of ranks
    that apply the parameter to different rows of activations; the gradient is summed over these
    groups, in addition to the sum over ranks with different tokens. A parameter that is not divided
    may consist of several matrices, whose sizes along dim 0 are `parts`; if `parts` is empty, the
    parameter is one matrix. `shared_gradient` is for sequence parallelism: if it is True, each
    tensor rank applies the parameter only to its own positions, so the gradient must be summed over
    the tensor axis. If `partial_gradient` is True, each tensor rank computes only one term of the
    gradient, for example because it applies the parameter only to its own heads. The gradient must
    then always be summed over the tensor axis. If `trains` is False, the parameter has no gradient,
    no master weight and no moments. `low_bit` is the quantized format that matrix products use. If
    the parameter does not train, it is also stored in this format.
    """

    shape: tuple[int, ...]
    split: Split | None
    init: float | str
    decay: bool
    apart: tuple[str, ...] = ()
    rows_over: tuple[str, ...] = ()
    parts: tuple[int, ...] = ()
    shared_gradient: bool = False
    partial_gradient: bool = False
    trains: bool = True
    low_bit: LowBit | None = None

    def __post_init__(self) -> None:
        what = f"a parameter of shape {self.shape}"
        if not all(map(is_size, self.shape)):
            raise InputError(f"{what}; legal: integers from 1")
        if self.init not in ("zeros", "ones") and not is_std(self.init):
            raise InputError(
                f"{what} has init = {self.init!r}; legal: a finite number from 0, zeros or ones"
            )
        if self.split is not None and not self.split.fits(self.shape):
            raise InputError(
                f"{what} has {self.split}; legal: a dim of the shape, and parts whose sum is the "
                "size of this dim"
            )
        for axis in self.apart:
            if not axis_named(axis).cuts_state:
                raise ValueError(
                    f'"{axis}" does not cut the state: all its ranks hold the same state'
                )

    @property
    def packed(self) -> bool:
        """Return True if the parameter is stored in a quantized format. Such a parameter is used
        only in matrix products, with its dequantized values."""
        return self.low_bit is not None and not self.trains

    @property
    def cut_by(self) -> tuple[str, ...]:
        """Return the axes along which ranks have different parts of the parameter's state. Along
        the pipeline axis and the axes in `apart`, ranks have different parameters. Along the other
        returned axes, ranks have different slices of the same parameter. Along an axis that is not
        returned, ranks have the same slice."""
        by_split = () if self.split is None else TENSOR_AXES
        return (*by_split, *SHARD_AXES, "pipeline", *self.apart)

    def partial_over(self, sequence_divided: bool) -> tuple[str, ...]:
        """Return the groups over which the gradient must be summed because each rank computes only
        one term of the gradient. The result does not include the axes along which ranks have
        different tokens, although gradients are also summed over these axes. `sequence_divided` is
        True under sequence parallelism."""
        if self.partial_gradient or (self.shared_gradient and sequence_divided):
            return (TENSOR, *self.rows_over)
        return self.rows_over

    def local_shape(self, tensor_size: int) -> tuple[int, ...]:
        """Return the shape of the slice on one of `tensor_size` tensor ranks, including padding."""
        if self.split is None:
            return self.shape
        shape = list(self.shape)
        shape[self.split.dim] = sum(self.split.local_sizes(tensor_size))
        return tuple(shape)

    def held(self, tensor_rank: int, tensor_size: int) -> Iterator[HeldShare]:
        """Yield the shares of the parameter on tensor rank `tensor_rank` of `tensor_size` ranks.
        Empty shares are skipped."""
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
    """A rank's local slice of a logical parameter. The gradient accumulates in `main_grad`.

    A backward may be split into two parts: the first part (op I) computes the gradients of inputs,
    and the second part (op W) adds the gradients of weights. During the first part, `later` is a
    list, in which the contributions to the gradient are stored until the second part adds them; at
    other times, `later` is None. `entry` is the parameter's position in the flat buffer. A tied
    table is used twice, in the embedding and in the head; for the second use, `second` is the
    position of the gradient of this use. `packed` has the quantized weights of a parameter that is
    stored in a quantized format; the parameter itself then has a shape and a type, but no values.
    """

    declaration: Declaration
    entry: "Entry"
    second: "Entry | None" = None
    packed: Packed | None = None
    main_grad: Tensor
    later: list[Callable[[], object]] | None = None

    @property
    def operand(self) -> Tensor:
        """Return the tensor that matrix products use: the parameter itself, or its dequantized
        values, which are computed for one product. For a parameter that trains, the gradient with
        respect to the dequantized values is used unchanged as the gradient of the parameter (the
        straight-through estimator: Bengio et al. 2013, arXiv 1308.3432, section 4)."""
        if self.packed is not None:
            return self.packed.values(self.dtype)
        form = self.declaration.low_bit
        return self if form is None else rounded(self.detach(), form)

    @property
    def puts_off(self) -> bool:
        """Return True if `accumulate` only stores contributions, because the first part of a split
        backward is running."""
        return self.later is not None

    def accumulate(self, add: Callable[[Tensor], object], *, alone: bool = False) -> None:
        """Call `add(main_grad)`, which adds a contribution to the gradient: immediately, or in the
        second part of a split backward. Until `add` is called, the tensors that it needs stay in
        memory. `add` may communicate over the tensor axis. If `alone` is True, the contribution is
        rounded to the type of `main_grad` before it is added. The result is then the same as if
        another rank had computed the contribution and sent it to this rank."""
        if alone:
            add = partial(_add_alone, add)
        if self.later is None:
            add(self.main_grad)
        else:
            self.later.append(partial(add, self.main_grad))


def _add_alone(add: Callable[[Tensor], object], total: Tensor) -> None:
    """Let `add` add its contribution to zeros instead of to `total`, and then add the rounded
    result to `total`."""
    product = torch.zeros_like(total)
    add(product)
    total.add_(product)


def declare(tensor_size: int, shape: Sequence[int], init: float | str, **options: Any) -> Parameter:
    """Return the slice of a parameter on one of `tensor_size` tensor ranks, without storage.
    `shape`, `init` and `options` are fields of `Declaration`.

    By default weight decay applies only to matrices, as in the training of GPT-3 and LLaMA.
    """
    options.setdefault("split", None)
    options.setdefault("decay", len(shape) > 1)
    declaration = Declaration(tuple(shape), init=init, **options)
    # a "meta" tensor has a shape but no memory; the memory for all parameters of a rank is one
    # buffer, which is allocated later
    local = torch.empty(declaration.local_shape(tensor_size), device="meta")
    parameter = Parameter(local)
    parameter.declaration = declaration
    return parameter


@dataclass(frozen=True)
class Entry:
    """A parameter, and the position of this rank's slice of the parameter in the flat buffers."""

    name: str
    declaration: Declaration
    start: int
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        """Return the number of elements of the local slice."""
        return math.prod(self.shape)

    def view(self, flat: Tensor) -> Tensor:
        """Return the view of the local slice in `flat`, which has the order of the flat buffer."""
        return flat[self.start : self.start + self.elements].view(self.shape)


@dataclass(frozen=True)
class DataTypes:
    """The torch data types of a precision: `compute` for weights and activations, `master` for
    master weights and gradients, and `iteration` for Muon's matrix products."""

    compute: torch.dtype
    master: torch.dtype
    iteration: torch.dtype = torch.bfloat16


def dtype_of(number: NumberType) -> torch.dtype:
    """Return the torch data type of the number type `number`, such as torch.bfloat16."""
    dtype: torch.dtype = getattr(torch, number.name)
    return dtype


def data_types(precision: str) -> DataTypes:
    """Return the torch data types for `precision`, a value of the key `precision.compute` such as
    "bf16"."""
    row = PRECISIONS[precision]
    return DataTypes(dtype_of(row.compute), dtype_of(row.master), dtype_of(row.iteration))
