"""Parameters by logical name, in flat buffers.

Each parameter of a layer is declared once with its logical (whole) shape and how the tensor axis
divides it. A rank's parameters then live in flat buffers: weights in the compute type, master
weights and gradients in float32 (float64 under fp64). Names and logical shapes are the same on
every rank and in every layout; only the local slices differ.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ptdmpi.base.box import Box
from ptdmpi.model.random import initial

# Every parameter starts at a multiple of this many elements, so that vectorised kernels handle each
# element alike (no scalar tails) wherever it stands: its bits do not depend on its neighbours.
ALIGNMENT = 64


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
        return tuple(min(tensor_size, one) for one in self.most)

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
    `shared_gradient`: under sequence parallelism each tensor rank sees only its positions, so the
    gradient of this replicated parameter is a part to be summed over the tensor axis.
    `partial_gradient`: it is one always, since each tensor rank sees only its heads. `trains`:
    without it the parameter has no gradient, no master weight and no moments.
    """

    shape: tuple[int, ...]
    split: Split | None
    init: float | str
    decay: bool
    shared_gradient: bool = False
    partial_gradient: bool = False
    trains: bool = True

    @property
    def replicated(self) -> tuple[str, ...]:
        """The axes along which all ranks hold the same slice of it."""
        return ("tensor", "data") if self.split is None else ("data",)

    def local_shape(self, tensor_size: int) -> tuple[int, ...]:
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
        dim, begin, local_begin = self.split.dim, 0, 0
        shares, sizes = self.split.shares(tensor_size), self.split.local_sizes(tensor_size)
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
            begin, local_begin = begin + part, local_begin + size


class Parameter(nn.Parameter):
    """A local slice of a logical tensor; `main_grad` is where its gradient accumulates.

    While `later` is a list, what would be added goes into the list: the backward is split, and its
    second part adds it.
    """

    declaration: Declaration
    main_grad: Tensor
    later: list[Callable[[], object]] | None = None

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

    def view(self, flat: Tensor) -> Tensor:
        return flat[self.start : self.start + math.prod(self.shape)].view(self.shape)


@dataclass(frozen=True)
class Precision:
    """Types of the weights and activations (`compute`), and of masters and gradients (`master`)."""

    compute: torch.dtype
    master: torch.dtype


PRECISIONS = {
    "bf16": Precision(torch.bfloat16, torch.float32),
    "fp16": Precision(torch.float16, torch.float32),
    "fp32": Precision(torch.float32, torch.float32),
    "fp64": Precision(torch.float64, torch.float64),
}


class ParameterBuffer:
    """All parameters of one rank in flat buffers, those with weight decay first, those that do not
    train last: these are `frozen` and have weights only, the `entries` masters and gradients too.

    `named`: (logical name, parameter) of all stages of the rank. A name that occurs twice is a tied
    weight: both occurrences share their storage, and the second keeps its gradient apart, in
    `second_gradient`, so that the two contributions can be reduced apart and then added.
    `trains` false: there are no gradients.
    """

    def __init__(
        self,
        named: Sequence[tuple[str, Parameter]],
        precision: Precision,
        device: torch.device,
        tensor_rank: int,
        tensor_size: int,
        trains: bool = True,
    ) -> None:
        self.tensor_rank, self.tensor_size = tensor_rank, tensor_size
        first: dict[str, Parameter] = {}
        again: dict[str, Parameter] = {}
        for name, parameter in named:
            (again if name in first else first)[name] = parameter
        trained = {name: p for name, p in first.items() if p.declaration.trains}
        self.entries: dict[str, Entry] = {}
        size = 0
        # so the optimizer has two tensors, one slice each, whatever the model is made of
        for decay in (True, False):
            matching = {n: p for n, p in trained.items() if p.declaration.decay == decay}
            size = _place(matching, self.entries, size)
            if decay:
                self.decay_size = size
        # behind all that trains, so that masters, moments and gradients end before them
        self.frozen: dict[str, Entry] = {}
        idle = {name: p for name, p in first.items() if not p.declaration.trains}
        weights_size = _place(idle, self.frozen, size)
        self.second: dict[str, Entry] = {}
        twice = {name: p for name, p in again.items() if p.declaration.trains}
        gradient_size = _place(twice, self.second, size)
        self.weights = torch.zeros(weights_size, dtype=precision.compute, device=device)
        # of one type, masters and weights are one storage
        self.one_type = precision.compute == precision.master
        self.master = self.weights[:size]
        if not self.one_type:
            self.master = torch.zeros(size, dtype=precision.master, device=device)
        self.trains = trains
        self.gradients = torch.zeros(
            gradient_size if trains else 0, dtype=precision.master, device=device
        )
        for name, parameter in (*first.items(), *again.items()):
            self._attach(name, parameter, self.second if parameter is again.get(name) else None)

    def _attach(self, name: str, parameter: Parameter, second: dict[str, Entry] | None) -> None:
        """Let a parameter stand on its part of the buffers; `second`: it is a tied one's copy."""
        declaration = parameter.declaration
        trains = self.trains and declaration.trains
        entry = (self.entries if declaration.trains else self.frozen)[name]
        # `.data` cannot change a meta tensor's type and device; swapping the whole storage can.
        attached = Parameter(entry.view(self.weights))
        torch.utils.swap_tensors(parameter, attached)
        parameter.declaration = declaration
        if not trains:
            parameter.requires_grad_(False)
            return
        parameter.main_grad = (self.entries if second is None else second)[name].view(
            self.gradients
        )
        # Layers of ours add to main_grad themselves; this serves the others (the norms).
        parameter.register_post_accumulate_grad_hook(_add_to_main_grad)

    def gradient(self, name: str) -> Tensor:
        return self.entries[name].view(self.gradients)

    def second_gradient(self, name: str) -> Tensor:
        return self.second[name].view(self.gradients)

    def initialise(self, seed: int) -> None:
        """Fill the master weights from (seed, name): the same logical tensors in every layout."""
        for entry in (*self.entries.values(), *self.frozen.values()):
            flat = self.master if entry.declaration.trains else self.weights
            local = entry.view(flat)
            whole = initial(seed, entry.name, entry.declaration.shape, entry.declaration.init)
            for held in entry.declaration.held(self.tensor_rank, self.tensor_size):
                local[held.local.index] = whole[held.logical.index].to(local)
        self.refresh_weights()

    def refresh_weights(self) -> None:
        """Bring the weights up to date with their masters."""
        if not self.one_type:
            self.weights[: self.master.numel()].copy_(self.master)


def _place(parameters: Mapping[str, Parameter], entries: dict[str, Entry], start: int) -> int:
    """Give each parameter an entry, one behind the other from `start`; returns their end."""
    for name, parameter in parameters.items():
        entries[name] = Entry(name, parameter.declaration, start, tuple(parameter.shape))
        start += -(-parameter.numel() // ALIGNMENT) * ALIGNMENT
    return start


def _add_to_main_grad(parameter: Parameter) -> None:
    # our own layers have added theirs already and hand autograd nothing
    if parameter.grad is not None:
        found, parameter.grad = parameter.grad, None
        parameter.accumulate(lambda total: total.add_(found))
