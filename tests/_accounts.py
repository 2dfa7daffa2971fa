"""What a single row of a layer multiplies, allocates, keeps for W and moves, seen at PyTorch's
dispatcher.

Memory that a library's kernel allocates inside itself is not seen, except the copies that a CPU's
elementwise kernels make of narrow operands.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from ptdmpi.model.experts.mixture import Mixture
from ptdmpi.model.operators import Context, RowStep, run
from ptdmpi.model.tensor_parallel import LayerLinear
from ptdmpi.plan.layer.experts import MixExperts
from tests._layers import Placed, positions, random_tensor
from tests._rows import tensors

FLASH = "_scaled_dot_product_flash_attention_for_cpu"
# Allocations, and views that PyTorch does not call views.
NOTHING = ("empty", "empty_like", "new_empty_strided", "zeros", "zeros_like", "_unsafe_view")
SCALES = ("mul", "mul_", "addcmul", "addcmul_")
OVERWRITES = ("copy_", "addmm_")  # the first operand is not read, or read by the product's kernel


class Live(TorchDispatchMode):
    """The storages that kernels make while the mode is on: `now`, the bytes of those that still
    live, and `peak`, the most of these bytes during a kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        given = {storage_of(each).cdata for each in tensors((*args, kwargs or {}))}
        result = function(*args, **(kwargs or {}))
        self._made = {key: made for key, made in self._made.items() if not made[0].expired()}
        for each in tensors(result):
            made = storage_of(each)
            if made.cdata not in given:
                self._made.setdefault(made.cdata, (made, each.untyped_storage().nbytes()))
        self.peak = max(self.peak, self.now + widened_bytes(function, args))
        return result

    @property
    def now(self) -> int:
        return sum(size for made, size in self._made.values() if not made.expired())


def storage_of(tensor: Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())


def widened_bytes(function: Any, args: tuple[Any, ...]) -> int:
    """Return the bytes of the copies in which a CPU's elementwise kernel reads operands that are
    narrower than its widest one."""
    if torch.Tag.pointwise not in function.tags:
        return 0
    given = [each for each in args if isinstance(each, Tensor) and each.dim()]
    widest = max((each.element_size() for each in given), default=0)
    return sum(each.numel() * widest for each in given if each.element_size() < widest)


class Move(NamedTuple):
    """A kernel's name, and the bytes of its operands and results."""

    name: str
    bytes: int


class Work(TorchDispatchMode):
    """The multiplications of the products that run while the mode is on (and those of elementwise
    kernels, `scaled`), and the bytes that each kernel moves: operands and results of at least
    `least` elements. What is written in place counts twice."""

    def __init__(self, least: int) -> None:
        super().__init__()
        self.least = least
        self.moves: list[Move] = []
        self.multiplications = 0
        self.scaled = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        name = function.overloadpacket.__name__
        if function.is_view or name in NOTHING:
            return result
        self.multiplications += multiplications(name, args)
        if name in SCALES:
            self.scaled += sum(each.numel() for each in tensors(result))
        moved = [*tensors(args[name in OVERWRITES :]), *tensors(result)]
        large = [each for each in moved if in_memory(each) >= self.least]
        if large:
            size = sum(in_memory(each) * each.element_size() for each in large)
            self.moves.append(Move(name, size))
        return result


def in_memory(tensor: Tensor) -> int:
    """Return the elements of a tensor; an expanded dim has one."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return math.prod(size for size, step in steps if step)


def multiplications(name: str, args: tuple[Any, ...]) -> int:
    """Return the multiplications of a product of matrices, or of attention with all its scores."""
    match name, args:
        case "mm" | "bmm", (left, right, *_):
            return left.numel() * right.shape[-1]
        case "addmm" | "addmm_" | "baddbmm", (_, left, right, *_):
            return left.numel() * right.shape[-1]
        case "_linear_pointwise", (x, weight, *_):
            return x.numel() * weight.shape[0]
        case str(kernel), (q, k, *_) if kernel == FLASH:
            return 2 * q.numel() * k.shape[-2]
    return 0


class Entry(Function):
    """The identity, whose gradient is dropped: no leaf keeps or copies it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> None:
        return None


@dataclass
class RowWork:
    """What a row did: the most bytes of a forward without a backward, with the inputs; the most
    further bytes of a backward; whether its graph keeps an input, and the bytes of its inputs; the
    bytes that stay from I to W, and the most further bytes of W; the work of both directions."""

    forward_bytes: int = 0
    backward_bytes: int = 0
    keeps_input: bool = False
    input_bytes: int = 0
    operands: int = 0
    adding_bytes: int = 0
    works: list[Work] = field(default_factory=list)


def works_of(placed: Placed, context: Context, least: int, shape: tuple[int, ...]) -> Iterator[Any]:
    """Yield (row, its work) for each row of a layer, in order."""
    kind = next(placed.layer.parameters()).dtype
    x = random_tensor("x", shape, "fp64").to(kind)
    values = {"x": positions(context.positions.of(x), placed.axis).clone()}
    for step in placed.layer.steps:
        given = {name: values[name] for name in step.row.inputs}
        work = RowWork()
        forward_alone(step, given, context, work)
        values.update(both(step, given, context, work, least))
        split(placed, step, given, context, work)
        yield step.row, work


def forward_alone(step: RowStep, given: dict[str, Tensor], context: Context, work: RowWork) -> None:
    """Measure a forward without a backward."""
    with torch.no_grad(), Live() as live:
        inputs = {name: value.clone() for name, value in given.items()}
        run([keeping(step)], inputs, context)
    work.forward_bytes = live.peak


def both(
    step: RowStep, given: dict[str, Tensor], context: Context, work: RowWork, least: int
) -> dict[str, Tensor]:
    """Measure a forward and a backward. Return the outputs."""
    inputs = {name: entered(value) for name, value in given.items()}
    storages = {storage_of(value).cdata for value in inputs.values()}
    work.input_bytes = sum(value.nbytes for value in inputs.values())

    def pack(tensor: Tensor) -> Tensor:
        work.keeps_input |= storage_of(tensor).cdata in storages
        return tensor

    with Work(least) as forward, saved_tensors_hooks(pack, lambda tensor: tensor):
        outputs = run([keeping(step)], inputs, context)
    made = [outputs[name] for name in step.row.outputs]
    gradients = [torch.ones_like(value) for value in made]
    results = {name: outputs[name].detach().clone() for name in step.row.outputs}
    with Live() as live, Work(least) as backward:
        torch.autograd.backward(made, gradients)
    work.backward_bytes = live.peak
    work.works = [forward, backward]
    return results


def split(
    placed: Placed, step: RowStep, given: dict[str, Tensor], context: Context, work: RowWork
) -> None:
    """Measure a backward that is split: what stays from I to W, and W."""
    later: list[Any] = []
    weights = list(placed.layer.parameters())
    for weight in weights:
        weight.later = later
    with Live() as live:
        inner(step, given, context)
        for module in placed.layer.modules():
            if isinstance(module, LayerLinear):
                module.delayed.seen.clear()  # the magnitudes of a step, which are no operands
        work.operands = live.now
    for module in placed.layer.modules():
        if isinstance(module, Mixture) and isinstance(step.row, MixExperts):
            work.operands -= module.counts.nbytes  # new counts of tokens, which are no operands
    for weight in weights:
        weight.later = None
    with torch.no_grad(), Live() as live:
        while later:
            later.pop(0)()
    work.adding_bytes = live.peak


def inner(step: RowStep, given: dict[str, Tensor], context: Context) -> None:
    """Run a forward and a backward, and let go of everything that the parameters do not keep."""
    inputs = {name: entered(value) for name, value in given.items()}
    outputs = run([keeping(step)], inputs, context)
    made = [outputs[name] for name in step.row.outputs]
    torch.autograd.backward(made, [torch.ones_like(value) for value in made])


def keeping(step: RowStep) -> RowStep:
    """Return the step, which lets go of no input."""
    return step._replace(last=frozenset())


def entered(value: Tensor) -> Tensor:
    """Return a copy that has a gradient, which nobody keeps."""
    return Entry.apply(value.detach().clone().requires_grad_())
