"""GELU and gated units: the part of an MLP between its two linears.

GELU's tanh form has two implementations. PyTorch's implementation saves the input, and computes a
tanh in the forward and again in the backward. A tanh takes as long as the exponentials of two
sigmoids. The second implementation is used on hosts on which measurements found it faster
(`choice.HostChoice`). It computes gelu(x) = x S(z) with z = 2 sqrt(2 / pi) (x + 0.044715 x^3),
where S is the logistic function. The forward also computes the derivative S(z) + x S(z) S(-z) dz/dx
and saves it instead of the input, so that the backward is one multiplication. The second
implementation computes in float32 or wider, for a few rows at a time, so that all intermediate
values fit into the caches of the processor. Each result is rounded once.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from ptdmpi.model.kernels import USUAL, Computing, Kernels
from ptdmpi.model.kernels.host import HALF_TYPES
from ptdmpi.model.kernels.tanh_form import CUBE, SLOPE
from ptdmpi.model.parameters import Parameter
from ptdmpi.plan.layer.elementwise import Activate

# The number of elements in a chunk of rows. The second implementation needs four float32 tensors
# for a chunk, which take 2 MiB in all.
CHUNK_ELEMENTS = 1 << 17
# PyTorch's implementation is used for tensors with fewer elements than this number. For such
# tensors, the second implementation saves no time, because it starts ten kernels instead of one. A
# tensor with at least this number of elements has a gradient that takes at least as much memory as
# the four tensors of a chunk.
LEAST_ELEMENTS = 8 * CHUNK_ELEMENTS
# GELU's derivative is at most 1.13, and a 16-bit type is half as precise between 1 and 2 as just
# below 1. In 16-bit types, the derivative is therefore multiplied by this factor, which makes it
# less than 1, before it is saved.
SHRUNK = 0.875

# an implementation of an activation: PyTorch's operations, or the second implementation of GELU
GeluForm = Literal["library", "sigmoid"]


def gelu_form(x: Tensor, activation: str, kernels: Kernels) -> GeluForm:
    """Return the implementation for the activation of x (see `gelu`, `gated`). It depends on the
    size of x, and determines the bits of the results. If the rows of x are divided among several
    calls of `gelu` or `gated`, pass them the implementation for the whole x."""
    if activation not in ("gelu", "geglu"):
        return "library"
    if x.device.type != "cpu" or torch.compiler.is_compiling() or x.numel() < LEAST_ELEMENTS:
        return "library"
    return kernels.chosen("cpu", x.dtype).gelu


def chunk_rows(width: int) -> int:
    """Return the number of rows in a chunk of a tensor [..., width] whose GELU is computed by the
    second implementation."""
    return max(1, CHUNK_ELEMENTS // max(1, width))


def gelu(
    x: Tensor, activation: str, kernels: Kernels = USUAL, *, form: GeluForm | None = None
) -> Tensor:
    """Return GELU of x, with the shape of x (Hendrycks and Gimpel 2016, arXiv 1606.08415). The
    result is GELU's tanh form, as in GPT-2, or for "gelu_exact" the form with the error function,
    as in BERT. `form` is the implementation of the tanh form; None means `gelu_form` of x."""
    if activation == "gelu_exact":
        return F.gelu(x)
    if (form or gelu_form(x, activation, kernels)) == "library":
        return F.gelu(x, approximate="tanh")
    if x.requires_grad and torch.is_grad_enabled():
        return _Gelu.apply(x)
    return _opened_by_sigmoid(x)


def gelu_with_bias(x: Tensor, bias: Parameter, activation: str) -> Tensor:
    """Return GELU of x + b for x [..., w] and the bias b [w], computed in Triton. `activation` is
    as in `gelu`. The backward adds the gradient of the bias to its `main_grad`."""
    y: Tensor = _FusedGelu.apply(x, bias, activation)
    return y


def gated(
    x: Tensor, activation: str, kernels: Kernels = USUAL, *, form: GeluForm | None = None
) -> Tensor:
    """Return act(gate) * value, [..., f], for x [..., 2 f], which has the gate and the value as its
    two halves (Shazeer 2020).

    `activation` is "swiglu" (SiLU) or "geglu" (GELU in its tanh form; for `form` see `gelu`).
    """
    if kernels.by_triton("gated"):
        return _FusedGated.apply(x, activation)
    if (form or gelu_form(x, activation, kernels)) == "library":
        return _Gated.apply(x, activation)
    if x.requires_grad and torch.is_grad_enabled():
        return _GatedBySlopes.apply(x)
    gate, value = x.chunk(2, dim=-1)
    return _opened_by_sigmoid(gate).mul_(value)


def _opened_by_sigmoid(x: Tensor) -> Tensor:
    y = torch.empty(x.shape, dtype=x.dtype)
    for part, room, (here,) in _chunks(x, y):
        wide, z, sigmoid = _sigmoid(part, room)
        _rounded(torch.mul, (wide, sigmoid), here, z)
    return y


def _write_with_slope(x: Tensor, y: Tensor, slope: Tensor, shrunk: float = 1.0) -> None:
    """Write gelu(x) into y, and `shrunk` times the derivative of gelu at x into `slope`. All three
    tensors have the same shape and contiguous rows."""
    exact = x.dtype not in HALF_TYPES
    for part, room, (here, slope_here) in _chunks(x, y, slope):
        wide, z, sigmoid = _sigmoid(part, room)
        _rounded(torch.mul, (wide, sigmoid), here, room[2])
        # one third of x dz/dx, where x dz/dx = 3 z - 4 sqrt(2 / pi) x
        inner = torch.sub(z, wide, alpha=2.0 / 3.0 * SLOPE, out=room[2])
        if exact:  # 1 - S(z) would have a rounding error, but S(-z) has none
            inner.mul_(sigmoid).mul_(z.neg_().sigmoid_())
        else:
            torch.ops.aten.sigmoid_backward.grad_input(inner, sigmoid, grad_input=inner)
        if shrunk != 1.0:
            sigmoid.mul_(shrunk)
        _rounded(partial(torch.add, alpha=3.0 * shrunk), (sigmoid, inner), slope_here, z)


def _rounded(
    function: Callable[..., Tensor], given: tuple[Tensor, ...], result: Tensor, room: Tensor
) -> None:
    """Write function(*given) into `result`. If the type of `result` is narrower than the type of
    `room`, write the function's value into `room` first, because torch would otherwise allocate new
    memory for it."""
    if result.dtype == room.dtype:
        function(*given, out=result)
    else:
        result.copy_(function(*given, out=room))


def _chunks(x: Tensor, *results: Tensor) -> Iterator[tuple[Tensor, list[Tensor], list[Tensor]]]:
    """Divide the rows of x [..., f] into chunks. For each chunk, yield the chunk, four temporary
    tensors of the chunk's shape in float32 or wider, and a list with the same rows of each tensor
    in `results`."""
    rows = x.flatten(0, -2)
    lines = [result.view(-1, result.shape[-1]) for result in results]
    step = chunk_rows(x.shape[-1])
    wide = torch.promote_types(x.dtype, torch.float32)
    room = list(torch.empty(4, min(step, len(rows)), x.shape[-1], dtype=wide))
    for first in range(0, len(rows), step):
        part = rows[first : first + step]
        if len(part) < len(room[0]):
            room = [numbers[: len(part)] for numbers in room]
        yield part, room, [line[first : first + step] for line in lines]


def _sigmoid(x: Tensor, room: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Return three tensors: x in the type of the computation, z, and S(z) (see the module
    docstring). The computed values are stored in `room`. Afterwards the caller may use the third
    tensor of `room` for other values."""
    z, sigmoid, square, wide = room
    if x.dtype == z.dtype:
        wide = x
    else:
        wide.copy_(x)
    torch.mul(wide, wide, out=square)
    torch.addcmul(wide, wide, square, value=CUBE, out=z).mul_(SLOPE)
    return wide, z, torch.sigmoid(z, out=sigmoid)


class _Gelu(Function):
    """GELU's tanh form, computed by a sigmoid. For the backward the function saves the derivative,
    which is as large as the input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y, slope = (torch.empty(x.shape, dtype=x.dtype) for _ in "ys")
        ctx.shrunk = 1.0
        if x.dtype in HALF_TYPES:
            ctx.shrunk = SHRUNK
        _write_with_slope(x, y, slope, ctx.shrunk)
        ctx.save_for_backward(slope)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        (slope,) = ctx.saved_tensors
        if ctx.shrunk == 1.0:
            return dy * slope
        # multiply dy by the saved derivative and by 1 / `shrunk` in one kernel, so that the result
        # is rounded only once
        return torch.addcmul(dy.new_zeros(()), dy, slope, value=1.0 / ctx.shrunk)


class _GatedBySlopes(Function):
    """A gated unit with GELU. For the backward the function saves the derivatives with respect to
    gate and value, which together are as large as the input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        gate, value = x.chunk(2, dim=-1)
        slopes = torch.empty(x.shape, dtype=x.dtype)
        by_gate, by_value = slopes.chunk(2, dim=-1)
        _write_with_slope(gate, by_value, by_gate)
        by_gate.mul_(value)
        ctx.save_for_backward(slopes)
        return by_value * value

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        (slopes,) = ctx.saved_tensors
        by_each = slopes.unflatten(-1, (2, -1))
        return (by_each * dy.unsqueeze(-2)).flatten(-2)


class _Gated(Function):
    """A gated unit: the activation of the gate times the value. The function saves only its input
    for the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, activation: str) -> Tensor:
        ctx.save_for_backward(x)
        ctx.activation = activation
        gate, value = x.chunk(2, dim=-1)
        return _opened(gate, activation).mul_(value)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        gate, value = x.chunk(2, dim=-1)
        if torch.compiler.is_compiling():  # a compiled graph cannot write into a part of a tensor
            dvalue = dy * _opened(gate, ctx.activation)
            return torch.cat((_gate_gradient(dy * value, gate, ctx.activation), dvalue), -1), None
        dx = torch.empty_like(x)
        # write both halves directly into the result, because torch.cat would need one more copy
        dgate, dvalue = dx.chunk(2, dim=-1)
        torch.mul(dy, _opened(gate, ctx.activation), out=dvalue)
        _write_gate_gradient(dgate, dy * value, gate, ctx.activation)
        return dx, None


class _FusedGelu(Function):
    """GELU of the sum of the input and a bias. One kernel in Triton computes it, and another
    computes its backward and partial sums of the gradient of the bias. For the backward the
    function saves only its input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Parameter, activation: str) -> Tensor:
        from ptdmpi.model.kernels.fused import gelu as fused

        x = x.contiguous()
        ctx.save_for_backward(x)
        ctx.bias, ctx.exact = bias, activation == "gelu_exact"
        return fused.forward(x, bias, exact=ctx.exact)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        from ptdmpi.model.kernels.fused import gelu as fused

        (x,) = ctx.saved_tensors
        bias: Parameter = ctx.bias
        dx, dbias = fused.backward(
            x, bias, dy.contiguous(), exact=ctx.exact, trains=bias.requires_grad
        )
        if dbias is not None:
            bias.accumulate(lambda total: total.add_(dbias))
        return dx, None, None


class _FusedGated(Function):
    """A gated unit that one kernel in Triton computes; another kernel computes its backward. For
    the backward the function saves only its input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, activation: str) -> Tensor:
        from ptdmpi.model.kernels.fused import gated as fused

        x = x.contiguous()
        ctx.save_for_backward(x)
        ctx.activation = activation
        return fused.forward(x, activation)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        from ptdmpi.model.kernels.fused import gated as fused

        (x,) = ctx.saved_tensors
        return fused.backward(x, dy.contiguous(), ctx.activation), None


def _write_gate_gradient(dgate: Tensor, dy: Tensor, gate: Tensor, activation: str) -> None:
    """Write the gradient of the gate into `dgate`, given the gradient `dy` of its activation. All
    three tensors have the same shape."""
    if activation == "swiglu":
        torch.ops.aten.silu_backward.grad_input(dy, gate, grad_input=dgate)
    else:
        torch.ops.aten.gelu_backward.grad_input(dy, gate, approximate="tanh", grad_input=dgate)


def _gate_gradient(dy: Tensor, gate: Tensor, activation: str) -> Tensor:
    if activation == "swiglu":
        return torch.ops.aten.silu_backward(dy, gate)
    return torch.ops.aten.gelu_backward(dy, gate, approximate="tanh")


def _opened(gate: Tensor, activation: str) -> Tensor:
    if activation == "swiglu":
        return F.silu(gate)
    return F.gelu(gate, approximate="tanh")


class Again(NamedTuple):
    """An activation that a backward computes again. `result` [..., w] is the activation.
    `write_gradient(dx, dy)` writes the gradient of the input into `dx`, given the gradient `dy` of
    the result."""

    result: Tensor
    write_gradient: Callable[[Tensor, Tensor], object]


@dataclass(frozen=True)
class ActivationFunction:
    """The activation `name` of an MLP, such as GELU, [..., w] -> [..., w], or, if `is_gated` is
    True, a gated unit, [..., 2 w] -> [..., w] (Shazeer 2020, arXiv 2002.05202). For the argument
    `form` of the methods see `gelu`."""

    name: str
    is_gated: bool

    def form(self, x: Tensor, kernels: Kernels) -> GeluForm:
        """Return the implementation for x (see `gelu_form`)."""
        return gelu_form(x, self.name, kernels)

    def of(self, x: Tensor, kernels: Kernels, form: GeluForm | None = None) -> Tensor:
        """Return the activations of x, [..., w]."""
        if self.is_gated:
            return gated(x, self.name, kernels, form=form)
        return gelu(x, self.name, kernels, form=form)

    def again(self, x: Tensor, kernels: Kernels, form: GeluForm | None = None) -> Again:
        """Return the activations of x, and the function that computes the gradient of x. Both use
        the same activation of the gate, which `_Gated` would compute twice."""
        form = form or self.form(x, kernels)
        if self.is_gated and form == "library" and not kernels.by_triton("gated"):
            gate, value = x.chunk(2, dim=-1)
            opened = _opened(gate, self.name)

            def write_gradient(dx: Tensor, dy: Tensor) -> None:
                dgate, dvalue = dx.chunk(2, dim=-1)
                torch.mul(dy, opened, out=dvalue)
                _write_gate_gradient(dgate, dy * value, gate, self.name)

            return Again(opened * value, write_gradient)
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            y = self.of(leaf, kernels, form)
        return Again(y.detach(), lambda dx, dy: dx.copy_(torch.autograd.grad(y, leaf, dy)[0]))


class Activation(Computing):
    """The activation of an MLP (see `ActivationFunction`)."""

    def __init__(self, row: Activate) -> None:
        super().__init__()
        self.function = ActivationFunction(row.function, row.gates == 2)

    def forward(self, x: Tensor, context: object = None) -> Tensor:
        """Return the activations, [..., w] (see `ActivationFunction`)."""
        return self.function.of(x, self.kernels)
