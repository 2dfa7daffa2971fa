"""The update of AdamW (Loshchilov and Hutter 2019, arXiv 1711.05101, algorithm 2) in one pass over
memory: it also clips the gradients before the update, and afterwards writes the weights of the
model and sets the gradients to zero.

For the gradient g and the clipping factor f, the moments u and v, the master weight m, the moving
average a, the learning rate r, the weight decay d, and the number k of the update (from 1), the
equations are

    g <- f g
    u <- u + (1 - beta1) (g - u),    v <- beta2 v + (1 - beta2) g^2
    m <- m - r d m
    m <- m - r / (1 - beta1^k) u / (sqrt(v / (1 - beta2^k)) + eps)
    a <- a + (1 - decay of the average) (m - a)
    w <- m rounded to the type of the weights,    g <- 0

For each element, the kernel reads and writes g, u, v and m once; it also writes w if the weights
are not the master weights, and reads and writes a if there is a moving average.

The reference implementation has one function for each step: `torch._foreach_mul_` clips
(`Optimizer.step` in `ptdmpi.engine.optimizer`), `update` in `ptdmpi.engine.updates` computes m, u,
v and a, `State.changed` writes w, and `Optimizer.clear` sets g to zero.
"""

import ctypes
import math
from collections.abc import Sequence
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from ptdmpi.config import OptimizerConfig
from ptdmpi.model.kernels.fused.launch import on_device_of, warps_of, wide

BLOCK = 1024  # the number of elements that a program updates


class UpdateNumbers(NamedTuple):
    """The numbers of an update: the factor that clips the gradients, the learning rate, the weight
    decay (before it is multiplied by the learning rate), and the number of earlier updates."""

    factor: float
    rate: float
    decay: float
    updates: int


@triton.jit
def _update(
    masters,
    weights,
    gradients,
    first,
    second,
    average,
    length,
    factor,
    factor_rest,
    decay,
    decay_rest,
    pace,
    pace_rest,
    correction,
    correction_rest,
    BETA1: tl.constexpr,
    BETA2: tl.constexpr,
    EPS: tl.constexpr,
    KEEPS: tl.constexpr,
    WRITES: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Update elements: each program of this Triton kernel updates up to BLOCK elements. Each of the
    numbers `factor`, `decay`, `pace` and `correction` is given as two float32 numbers, whose sum it
    is (see `_halves`). KEEPS is the decay of the moving average, or 0 if there is none."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < length
    g = tl.load(gradients + at, mask=inside, other=0.0).to(WIDE)
    u = tl.load(first + at, mask=inside, other=0.0).to(WIDE)
    v = tl.load(second + at, mask=inside, other=0.0).to(WIDE)
    m = tl.load(masters + at, mask=inside, other=0.0).to(WIDE)
    g *= tl.cast(factor, WIDE) + tl.cast(factor_rest, WIDE)
    u += (1.0 - BETA1) * (g - u)
    v = BETA2 * v + (1.0 - BETA2) * g * g
    m -= (tl.cast(decay, WIDE) + tl.cast(decay_rest, WIDE)) * m
    root = tl.sqrt(v) * (tl.cast(correction, WIDE) + tl.cast(correction_rest, WIDE))
    m -= (tl.cast(pace, WIDE) + tl.cast(pace_rest, WIDE)) * u / (root + EPS)
    tl.store(first + at, u, mask=inside)
    tl.store(second + at, v, mask=inside)
    tl.store(masters + at, m, mask=inside)
    tl.store(gradients + at, tl.zeros_like(g), mask=inside)
    if KEEPS > 0.0:
        a = tl.load(average + at, mask=inside, other=0.0).to(WIDE)
        tl.store(average + at, a + (1.0 - KEEPS) * (m - a), mask=inside)
    if WRITES:
        tl.store(weights + at, m.to(weights.dtype.element_ty), mask=inside)


def update(
    config: OptimizerConfig,
    masters: Tensor,
    gradients: Tensor,
    moments: Sequence[Tensor],
    *,
    weights: Tensor | None,
    step: UpdateNumbers,
) -> None:
    """Clip the gradients and do the update of AdamW (see the module docstring), all in place. The
    tensors are flat, contiguous and of equal lengths. `moments` has the first and the second moment
    and, if `config.ema_decay` is above 0, the moving average of the master weights. `weights` is
    None if the master weights are themselves the weights of the model."""
    length = masters.numel()
    if not length:
        return
    first, second, *average = moments
    number = step.updates + 1
    numbers = (
        step.factor,
        step.rate * step.decay,
        step.rate / (1.0 - config.beta1**number),
        1.0 / math.sqrt(1.0 - config.beta2**number),
    )
    with on_device_of(masters):
        _update[(-(-length // BLOCK),)](
            masters,
            masters if weights is None else weights,
            gradients,
            first,
            second,
            *(average or [masters]),
            length,
            *(half for exact in numbers for half in _halves(exact)),
            BETA1=config.beta1,
            BETA2=config.beta2,
            EPS=config.eps,
            KEEPS=config.ema_decay,
            WRITES=weights is not None,
            BLOCK=BLOCK,
            WIDE=wide(masters),
            num_warps=warps_of(BLOCK),
        )


def _halves(exact: float) -> tuple[float, float]:
    """Return two numbers whose sum is `exact`: the nearest number in float32, and the rest. Triton
    passes numbers to a kernel in float32, which is not precise enough for float64 tensors."""
    near = ctypes.c_float(exact).value
    return near, exact - near
