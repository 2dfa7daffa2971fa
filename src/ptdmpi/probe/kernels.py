"""Measurements of the rates of the trainer's kernels for several shapes: matrix multiplications,
additions of tensors (memory bandwidth), attention and elementwise kernels."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ptdmpi.base.words import short
from ptdmpi.model.kernels import activation
from ptdmpi.model.kernels.attention import AttentionCore
from ptdmpi.model.kernels.blocks import Scores
from ptdmpi.model.kernels.norm import rms_norm
from ptdmpi.model.kernels.timing.bench import Bench
from ptdmpi.model.output.cross_entropy import cross_entropy
from ptdmpi.model.tensor_parallel import TensorAxis
from ptdmpi.plan.machine.kernels import Machine

HEAD_SIZES = (32, 128)
# PER_PRODUCT is the number of measurements for each shape of a matrix multiplication. OTHERS is the
# number of measurements of attention (for each head size) and of the five elementwise kernels. Each
# of these kernels is measured forward and backward.
PER_PRODUCT = 3
OTHERS = 2 * len(HEAD_SIZES) + 2 * 5


@dataclass(frozen=True)
class Extent:
    """The sizes of the kernels that are measured.

    `sides` are the side lengths of matrices. `stream_bytes` are the bytes that one addition of
    tensors reads and writes. `seq_length` and `heads` are the number of positions and of heads in
    attention. `elementwise` has the numbers of rows and columns in elementwise kernels.
    """

    sides: tuple[int, ...]
    stream_bytes: tuple[int, ...]
    seq_length: int
    heads: int
    elementwise: tuple[int, int]


CPU = Extent(
    sides=(64, 256, 1024),
    stream_bytes=tuple(1 << power for power in range(14, 27, 2)),
    seq_length=256,
    heads=4,
    elementwise=(512, 1024),
)
GPU = Extent(
    sides=(256, 1024, 4096, 8192),
    stream_bytes=tuple(1 << power for power in range(18, 31, 2)),
    seq_length=2048,
    heads=16,
    elementwise=(4096, 4096),
)


def launch_s(bench: Bench) -> float:
    """Return the seconds of a kernel that computes almost nothing. The measurements use this time
    as the cost of a kernel launch."""
    tiny = torch.ones(16, device=bench.device)
    seconds = bench.work_s(lambda: [tiny + tiny for _ in range(100)]) / 100
    bench.note("smallest kernel", f"{seconds * 1e6:.1f} us")
    return seconds


def products(
    bench: Bench, dtype: torch.dtype, sides: Sequence[int], launch: float
) -> dict[str, Any]:
    """Return a table of the FLOP/s of matrix multiplications (m, k) x (k, n), for all combinations
    of `sides`.

    Each rate is computed from the mean time of the three multiplications that a linear layer needs:
    one each for the output, the gradient of the input, and the gradient of the weight. `launch`,
    the seconds of a kernel launch, is subtracted from the mean time.
    """
    rates: list[list[list[float]]] = []
    for m in sides:
        rates.append([])
        for n in sides:
            row = [_product(bench, dtype, (m, n, k), launch) for k in sides]
            rates[-1].append(row)
    best = max(rate for plane in rates for row in plane for rate in row)
    least = min(rate for plane in rates for row in plane for rate in row)
    bench.note(
        f"products of {min(sides)} to {max(sides)} cubed, {str(dtype).removeprefix('torch.')}",
        f"{least / 1e9:,.1f} to {best / 1e9:,.1f} GFLOP/s",
    )
    return {"m": list(sides), "n": list(sides), "k": list(sides), "flops_per_s": rates}


def _product(bench: Bench, dtype: torch.dtype, shape: tuple[int, int, int], launch: float) -> float:
    """Return the FLOP/s of the matrix multiplications of a linear layer with k inputs and n outputs
    at m positions. `shape` is (m, n, k)."""
    m, n, k = shape

    def random(*size: int) -> Tensor:
        """Return a tensor of shape `size` with random numbers in the data type that is measured."""
        return torch.randn(size, device=bench.device).to(dtype)

    x = random(m, k)
    weight = random(n, k)
    turned = random(k, n)
    dy = random(k, n)
    given = random(k, m)
    wide = torch.promote_types(dtype, torch.float32)
    total = torch.zeros(n, m, dtype=wide, device=bench.device)
    exact = x[-1].double() @ weight.double().t()
    off = (bench.kernels.linear(x, weight)[-1].double() - exact).abs().max()
    bench.check(bool(off <= 0.02 * exact.abs().max()), f"product {m} x {n} x {k}")
    seconds = sum(
        bench.work_s(work)
        for work in (
            lambda: bench.kernels.linear(x, weight),
            lambda: bench.kernels.input_gradient(x, turned),
            lambda: bench.kernels.add_weight_gradient(total, dy, given),
        )
    )
    return 2 * m * n * k / max(seconds / 3 - launch, 0.2 * seconds / 3)


def streams(
    bench: Bench, dtype: torch.dtype, sizes: Sequence[int], launch: float
) -> dict[str, Any]:
    """Return a table of memory bandwidths, in bytes per second. The bandwidth is measured by adding
    two tensors.

    `sizes` are the total bytes that one addition reads and writes. The sizes should range from
    sizes that fit into caches to sizes that do not. `launch`, the seconds of a kernel launch, is
    subtracted from each time.
    """
    times = []
    for size in sizes:
        elements = size // 3 // dtype.itemsize
        a, b = (torch.ones(elements, device=bench.device, dtype=dtype) for _ in range(2))
        bench.check(bool((a + b == 2).all()), f"sum of tensors of {size // 3} bytes")
        seconds = bench.work_s(partial(torch.add, a, b))
        times.append(max(seconds - launch, 0.2 * seconds))
    rates = [size / seconds for size, seconds in zip(sizes, rising(times), strict=True)]
    bench.note("memory", f"{rates[-1] / 1e9:,.1f} GB/s, {max(rates) / 1e9:,.1f} GB/s in caches")
    return {"moved_bytes": list(sizes), "bytes_per_s": rates}


def rising(times_s: Sequence[float]) -> list[float]:
    """Return the times `times_s` of kernels with ascending sizes. A time that is smaller than an
    earlier time is replaced by the largest earlier time. Without this correction, noise in the
    measurement could make a larger kernel look faster than a smaller kernel."""
    return list(accumulate(times_s, max))


def attention(bench: Bench, dtype: torch.dtype, extent: Extent, launch: float) -> dict[str, Any]:
    """Return a table of the seconds per attention score (a pair of a query and a key) of causal
    attention, forward and backward, for each head size. `launch`, the seconds of a kernel launch,
    is subtracted from each time."""
    forward = []
    backward = []
    s = extent.seq_length
    heads = extent.heads
    scores = Machine.causal_scores(heads * s, s)
    for size in HEAD_SIZES:
        q, k, v = (
            torch.randn(1, heads, s, size, device=bench.device).to(dtype).requires_grad_()
            for _ in range(3)
        )
        core = AttentionCore(Scores(size**-0.5), bench.kernels)
        out = core(q, k, v)
        near = F.softmax((q[0, 0, -1].double() @ k[0, 0].double().t()) / size**0.5, -1)
        off = (out[0, 0, -1].double() - near @ v[0, 0].double()).abs().max()
        bench.check(bool(off < 0.05), f"attention of heads of {size}")
        ahead_s = bench.work_s(partial(core, q, k, v))
        gradient = torch.ones_like(out)
        back_s = bench.work_s(
            partial(torch.autograd.grad, out, (q, k, v), gradient, retain_graph=True)
        )
        forward.append(max(ahead_s - launch, 0.2 * ahead_s) / scores)
        backward.append(max(back_s - launch, 0.2 * back_s) / scores)
        bench.note(
            f"attention, heads of {size}",
            f"{short(1 / forward[-1])} scores/s forward, {short(1 / backward[-1])} backward",
        )
    return {
        "head_sizes": list(HEAD_SIZES),
        "forward_s_per_score": forward,
        "backward_s_per_score": backward,
    }


def elementwise(
    bench: Bench, axis: TensorAxis, dtype: torch.dtype, extent: Extent, *, launch: float
) -> dict[str, float]:
    """Return the seconds per element of activation functions, norms and the loss. `launch`, the
    seconds of a kernel launch, is subtracted from each time.

    Forward and backward passes have separate times. The results are compared with results in double
    precision.
    """
    rows, columns = extent.elementwise
    ones = torch.ones(columns, device=bench.device, dtype=dtype, requires_grad=True)
    zeros = torch.zeros(columns, device=bench.device, dtype=dtype, requires_grad=True)
    labels = torch.arange(rows, device=bench.device)[:, None] % columns

    def layernorm(x: Tensor) -> Tensor:
        """Compute LayerNorm."""
        return F.layer_norm(x, (columns,), ones.to(x.dtype), zeros.to(x.dtype))

    def rmsnorm(x: Tensor) -> Tensor:
        """Compute RMSNorm."""
        return rms_norm(x, ones.to(x.dtype), 1e-5)

    def loss(x: Tensor) -> Tensor:
        """Compute the loss of a copy of `x`, because the loss overwrites its input."""
        return cross_entropy((x + 0.0)[:, None], labels, None, axis)

    kinds: dict[str, tuple[Callable[[Tensor], Tensor], int]] = {
        "gelu": (partial(activation.gelu, activation="gelu", kernels=bench.kernels), 1),
        "swiglu": (partial(activation.gated, activation="swiglu", kernels=bench.kernels), 2),
        "layernorm": (layernorm, 1),
        "rmsnorm": (rmsnorm, 1),
        "loss": (loss, 1),
    }
    seconds_per_element = {}
    for name, (function, width) in kinds.items():
        x = torch.randn(rows, width * columns, device=bench.device).to(dtype).requires_grad_()
        out = function(x)
        exact = function(x.detach().double())
        off = (out.double() - exact).abs().max()
        bench.check(bool(off <= 0.02 * exact.abs().max()), name)
        gradient = torch.ones_like(out)
        forward_s = bench.work_s(partial(function, x))
        both_s = bench.work_s(partial(_there_and_back, function, x, gradient))
        for kind, seconds in ((name, forward_s), (f"{name}_backward", both_s - forward_s)):
            seconds_per_element[kind] = max(seconds - launch, 0.2 * forward_s) / (rows * columns)
        bench.note(
            name,
            f"{short(1 / seconds_per_element[name])} elements/s forward, "
            f"{short(1 / seconds_per_element[f'{name}_backward'])} backward",
        )
    return seconds_per_element


def _there_and_back(
    function: Callable[[Tensor], Tensor], x: Tensor, gradient: Tensor
) -> tuple[Tensor, ...]:
    """Compute `function(x)` and its backward pass. Return the gradient with respect to `x`."""
    return torch.autograd.grad(function(x), x, gradient)
