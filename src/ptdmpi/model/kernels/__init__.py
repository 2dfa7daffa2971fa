"""What a layer computes between its collectives, as quick as the device allows and keeping little.

A CPU without bfloat16 or float16 instructions falls back to scalar code for products of those types
(measured on an AVX2 machine: 0.3 to 8 GFLOP/s where float32 reaches 40). There the operands are
widened to float32 first and the result is rounded once: the values that hardware with float32
accumulators gives.

Where PyTorch composes an operation of several on a CPU, each of them keeps what its own backward
wants; such an operation is one Function here that keeps its input alone.
"""

import contextlib
import math
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, wraps
from importlib.resources import files
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from ptdmpi.model.parameters import Parameter

HALF_TYPES = (torch.bfloat16, torch.float16)
FUSED_TYPES = (torch.float32, torch.bfloat16)
# PyTorch's CPU kernel skips what lies above the diagonal only in steps of 512 keys. Taken in blocks
# of so many queries, each on the keys up to its end, s = 512 costs five eighths.
QUERY_BLOCK = 128

_answers: list[Callable[..., Any]] = []


def _asked_once(ask: Callable[..., Any]) -> Callable[..., Any]:
    """`ask`, to which a machine always answers the same."""
    known = cache(ask)

    @wraps(ask)  # a plain function: a compiler looks through a cache, and says so
    def answer(*arguments: Any) -> Any:
        return known(*arguments)

    _answers.append(answer)
    return answer


@_asked_once
def multiplies(device_type: str, dtype: torch.dtype) -> bool:
    """Whether this device multiplies numbers of this type as they are."""
    if device_type != "cpu" or dtype not in HALF_TYPES:
        return True
    capabilities = torch.cpu.get_capabilities()
    native = {
        torch.bfloat16: ("avx512_bf16", "amx_bf16"),
        torch.float16: ("avx512_fp16", "amx_fp16"),
    }
    return any(capabilities.get(name, False) for name in native[dtype])


def widens(device_type: str, dtype: torch.dtype) -> bool:
    """Whether products of this type are taken in float32 on this device: where it has no other
    way, or the run began on one that has none."""
    if not multiplies(device_type, dtype):
        return True
    return device_type == "cpu" and dtype in HALF_TYPES and ways("cpu", dtype).widened


class HostWays(NamedTuple):
    """How a host computes. Causal attention by matrix products, over blocks of so many queries,
    whose probabilities are computed again in the backward pass or `keeps`, there and back or, after
    `library_forward`, back alone, scores of bfloat16 in oneDNN's `fpmath` mode; or by the library's
    kernel: in blocks of queries, from `whole_from` positions on at once. x W^T + b and dy W by
    oneDNN's one call, from so many products of two numbers on, and not by what the library calls
    for a product and then for the bias. GELU's tanh form by a sigmoid (`activation`). Half types
    `widened` to float32 for products though the processor multiplies them."""

    products: bool = False
    whole_from: float = math.inf
    output: float = math.inf
    input_gradient: float = math.inf
    block: int = QUERY_BLOCK
    keeps: bool = False
    gelu_by_sigmoid: bool = False
    widened: bool = False
    library_forward: bool = False
    fpmath: bool = False


Entries = Mapping[str, Sequence[Mapping[str, Any]]]  # as the table's, by kind


def measured_ways(dtype: torch.dtype, own: Entries) -> HostWays:
    """What this host takes for operands of a type: by the first entry that fits it, of `own` and
    then of the table; where none does, the library's way."""
    attention, linear, gelu = (_entry(kind, dtype, own) for kind in ("attention", "linear", "gelu"))
    never = not has_fused()
    return HostWays(
        products=attention.get("way") == "products",
        whole_from=float(attention.get("whole_from", math.inf)),
        output=math.inf if never else float(linear.get("output", math.inf)),
        input_gradient=math.inf if never else float(linear.get("input_gradient", math.inf)),
        block=attention.get("block", QUERY_BLOCK),
        keeps=attention.get("keeps", False),
        gelu_by_sigmoid=gelu.get("way") == "sigmoid",
        library_forward=attention.get("library_forward", False),
        fpmath=attention.get("fpmath", False),
    )


def _entry(kind: str, dtype: torch.dtype, own: Entries) -> Mapping[str, Any]:
    has = torch.cpu.get_capabilities()
    for entry in (*own.get(kind, ()), *table()[kind]):
        known = not entry["capability"] or has.get(entry["capability"], False)
        named = str(has.get("cpu_name", "")).startswith(entry.get("cpu", ""))
        if known and named and dtype == getattr(torch, entry["type"]):
            return entry
    return {}


@_asked_once
def usual_ways(device_type: str, dtype: torch.dtype) -> HostWays:
    """What is taken without a run that has settled on its ways."""
    return HostWays() if device_type != "cpu" else measured_ways(dtype, {})


def has_fused() -> bool:
    """Whether torch has that call."""
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


_taken: list[HostWays] = []  # by the run that is going on, whatever this machine would take


def ways(device_type: str, dtype: torch.dtype) -> HostWays:
    """`usual_ways`, unless a run has settled on its own (`taken`)."""
    return _taken[-1] if _taken else usual_ways(device_type, dtype)


@contextlib.contextmanager
def taken(settled: HostWays) -> Iterator[None]:
    """The host computes so for as long as it lasts, process-wide."""
    _taken.append(settled)
    try:
        yield
    finally:
        _taken.pop()


@_asked_once
def adds_wide(device_type: str) -> bool:
    """Whether a product of half types is added to a float32 sum by its own kernel here."""
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    for entry in table()["weight_gradient"]:
        vendor = "rocm" if torch.version.hip else device_type
        if entry["device"] == vendor and version >= tuple(entry["torch"]):
            return bool(entry["way"] == "adds")
    return False


@_asked_once
def has_flash(device_type: str) -> bool:
    """Whether FlashAttention runs on the devices of this kind that this rank has: of NVIDIA's those
    from Ampere on."""
    if device_type != "cuda" or torch.version.hip:
        return True
    return bool(torch.cuda.get_device_capability() >= (8, 0))


def settle(constant: Callable[[Callable[..., Any]], object]) -> None:
    """Tell a compiler, by `constant`, what a machine answers the same whenever it is asked."""
    for answer in _answers:
        constant(answer)


@cache
def table() -> dict[str, Any]:
    """The table of kernel choices, presets/kernels.toml."""
    text = files("ptdmpi").joinpath("presets", "kernels.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


def operand(weight: Tensor) -> Tensor:
    """What a product takes of a weight: of one in few bits their values, made for it alone."""
    return weight.operand if isinstance(weight, Parameter) else weight


def widened(x: Tensor) -> Tensor:
    """The operand of a product as it is multiplied on its device."""
    return x.float() if widens(x.device.type, x.dtype) else x


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + b: x [..., i], weight [o, i], bias [o] -> [..., o]."""
    weight = operand(weight)
    if _fused(x, weight, "output") and (bias is not None or x.dtype == torch.float32):
        return linear_by_onednn(x, weight, bias)
    if not widens(x.device.type, x.dtype):
        return F.linear(x, weight, bias)
    bias = None if bias is None else bias.float()
    return F.linear(x.float(), weight.float(), bias).to(x.dtype)


def input_gradient(dy: Tensor, weight: Tensor) -> Tensor:
    """dy W: dy [..., o], weight [o, i] -> [..., i]."""
    weight = operand(weight)
    if _fused(dy, weight, "input_gradient"):
        return linear_by_onednn(dy, weight.t(), None)
    return (widened(dy) @ widened(weight)).to(dy.dtype)


def linear_by_onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`linear`, the bias added where the product is: torch's own call copies it to all rows of the
    result first. It has no gradient of its own: for what a Function computes."""
    result: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return result


def _fused(x: Tensor, weight: Tensor, which: Literal["output", "input_gradient"]) -> bool:
    """Whether oneDNN's one call takes the product of x [..., i] and a matrix."""
    if x.device.type != "cpu" or x.dtype not in FUSED_TYPES or not x.numel():
        return False
    # in a graph that call is for constant weights alone (Inductor asserts it)
    if widens("cpu", x.dtype) or torch.compiler.is_compiling():
        return False
    settled = ways("cpu", x.dtype)
    least = settled.output if which == "output" else settled.input_gradient
    return x.shape[:-1].numel() * weight.numel() >= least


def add_weight_gradient(total: Tensor, dy: Tensor, x: Tensor) -> None:
    """total += dy^T x over the positions: dy [..., o], x [..., i]; total [o, i] in float32 up."""
    dy = widened(dy.reshape(-1, dy.shape[-1]))
    x = widened(x.reshape(-1, x.shape[-1]))
    # product and sum in one kernel, where the types allow it
    if total.dtype == dy.dtype:
        total.addmm_(dy.t(), x)
    elif adds_wide(dy.device.type):
        # its accumulator in float32 is added as it is; else it is rounded, stored, and read again
        if torch.compiler.is_compiling():  # whose compiler has no such addmm (pytorch #163880)
            total += torch.mm(dy.t(), x, out_dtype=total.dtype)
        else:
            torch.addmm(total, dy.t(), x, out_dtype=total.dtype, out=total)
    else:
        total += dy.t() @ x


def product(a: Tensor, b: Tensor) -> Tensor:
    """a b, batched."""
    return (widened(a) @ widened(b)).to(a.dtype)


class _RmsNorm(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        scale = wide.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return (wide * scale).mul_(weight).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, weight, scale = ctx.saved_tensors
        normed = x * scale
        dnormed = dy * weight.to(scale.dtype)
        dweight = None
        if ctx.needs_input_grad[1]:
            dweight = (dy * normed).flatten(0, -2).sum(0).to(weight.dtype)
        # dx = (g - n mean(g n)) / rms with n = x / rms, g = dy w: the derivative of equation 4
        projection = (dnormed * normed).mean(-1, keepdim=True)
        dx = dnormed.sub_(normed.mul_(projection)).mul_(scale)
        return dx.to(x.dtype), dweight, None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dim, in float32 at least.

    Zhang and Sennrich 2019 (arXiv 1910.07467), equation 4.
    """
    if x.device.type == "cpu" or weight.dtype != x.dtype:
        return _RmsNorm.apply(x, weight, eps)
    return F.rms_norm(x, weight.shape, weight, eps)


class _Cap(Function):
    """Keeps the tangent alone: what overwrites the result, as the loss does, leaves it in peace."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cap: float) -> Tensor:
        tangent = (x / cap).tanh_()
        ctx.save_for_backward(tangent)
        return tangent * cap

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        (tangent,) = ctx.saved_tensors
        return torch.ops.aten.tanh_backward(dy, tangent), None


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """cap * tanh(x / cap): between -cap and cap (Gemma Team 2024, arXiv 2408.00118, section 2)."""
    return _Cap.apply(x, cap)
