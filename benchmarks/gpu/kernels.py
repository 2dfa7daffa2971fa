"""Kernels on one GPU: the speed of each implementation, and its difference from a float32
result."""

import contextlib
import importlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from benchmarks.gpu import timing
from benchmarks.gpu.timing import Row, seconds_of
from ptdmpi.comm.world import World
from ptdmpi.config import ModelConfig, OptimizerConfig
from ptdmpi.engine.offload import Alike
from ptdmpi.engine.updates import update, update_in_one_pass
from ptdmpi.model.kernels import USUAL, Kernels, agreement
from ptdmpi.model.kernels.activation import gated, gelu
from ptdmpi.model.kernels.compiler import missing_for_triton
from ptdmpi.model.kernels.dropout import drop_hidden
from ptdmpi.model.kernels.fused import KINDS
from ptdmpi.model.kernels.norm import rms_norm
from ptdmpi.model.kernels.rope import rotate
from ptdmpi.model.kernels.wide import sum_of_rows
from ptdmpi.model.output.cross_entropy import cross_entropy
from ptdmpi.model.random import RandomStream
from ptdmpi.model.tensor_parallel import TensorAxis
from ptdmpi.model.transformer import rotary_table
from ptdmpi.plan.layout.grid import training_grid


def _skipped(error: Exception) -> dict[str, str]:
    """Return the table row for an implementation that the library on this machine does not have."""
    return {"skipped": str(error).partition("\n")[0]}


def _distance(result: Tensor, exact: Tensor) -> float:
    """Return the largest difference from `exact`, relative to the largest magnitude in `exact`."""
    return float((result.detach().float() - exact).abs().max() / exact.abs().max())


def weight_gradients(device: torch.device, size: int = 4096) -> dict[str, Any]:
    """Return two numbers for each method of adding the gradient of a weight [size, size] to a
    float32 sum: the seconds, and the difference from a float32 result. In the method "adds", the
    matrix multiplication itself adds the gradient to the sum. In the method "rounds", a second
    kernel adds the rounded gradient to the sum. The method "as chosen" is the one that the trainer
    chooses on this machine."""
    generator = torch.Generator().manual_seed(1)
    dy = torch.randn(size // 2, size, generator=generator).bfloat16().to(device)
    x = torch.randn(size // 2, size, generator=generator).bfloat16().to(device)
    exact = dy.float().t() @ x.float()
    ways: dict[str, Callable[[Tensor], object]] = {
        "adds": lambda total: torch.addmm(total, dy.t(), x, out_dtype=torch.float32, out=total),
        "rounds": lambda total: total.add_(dy.t() @ x),
        "as chosen": lambda total: USUAL.add_weight_gradient(total, dy, x),
    }
    rows: dict[str, Any] = {}
    for way, add in ways.items():
        total = torch.zeros(size, size, device=device)
        try:
            add(total)
            apart = _distance(total, exact)
            rows[way] = {"s": seconds_of(partial(add, total), device), "apart": apart}
        except RuntimeError as error:
            rows[way] = _skipped(error)
    return rows


def attentions(device: torch.device, shape: tuple[int, ...] = (2, 16, 2048, 128)) -> dict[str, Any]:
    """Return, for each backend of PyTorch's `scaled_dot_product_attention`, the seconds of causal
    attention in bfloat16, forward and backward, and the difference from a float32 result. `shape`
    is [batch, heads, sequence, head size]."""
    attention: Any = importlib.import_module("torch.nn.attention")
    inputs = [torch.randn(shape).bfloat16().to(device) for _ in range(3)]
    with attention.sdpa_kernel(attention.SDPBackend.MATH):
        wide = [tensor.float() for tensor in inputs]
        exact = F.scaled_dot_product_attention(*wide, is_causal=True)
    for tensor in inputs:
        tensor.requires_grad_()

    def forward() -> Tensor:
        return F.scaled_dot_product_attention(*inputs, is_causal=True)

    rows: dict[str, Any] = {}
    ways = {**agreement.BACKENDS, "efficient": "EFFICIENT_ATTENTION"}
    for way, backend in ways.items():
        with contextlib.ExitStack() as restored:
            try:
                if way == "fa3":
                    attention.activate_flash_attention_impl("FA3")
                    restored.callback(attention.restore_flash_attention_impl)
                kernel = attention.sdpa_kernel(getattr(attention.SDPBackend, backend))
                restored.enter_context(kernel)
                apart = _distance(forward(), exact)
                s = seconds_of(lambda: forward().sum().backward(), device)
                rows[way] = {"s": s, "apart": apart}
            except (RuntimeError, ImportError, ValueError) as error:
                rows[way] = _skipped(error)
    return rows


def rope_formula(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return RoPE of `x` [tokens, batch, heads, head size], computed by its formula in torch's own
    operations. `cos` and `sin` are the cosines and sines of the rotation angles."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def swiglu_formula(x: Tensor) -> Tensor:
    """Return SwiGLU of `x` [tokens, batch, 2 width], computed by its formula."""
    gate, value = x.chunk(2, dim=-1)
    return F.silu(gate) * value


def rms_norm_formula(x: Tensor, weight: Tensor) -> Tensor:
    """Return RMSNorm of `x` [tokens, batch, hidden], computed by its formula."""
    wide = x.float()
    return (wide * (wide.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight).to(x.dtype)


def rms_norm_in_triton(x: Tensor, weight: Tensor) -> Tensor:
    """Return RMSNorm of `x` [tokens, batch, hidden], computed by ptdmpi's kernel in Triton."""
    from ptdmpi.model.kernels.fused.norm import add_and_normalize

    return add_and_normalize(x, None, weight, None, eps=1e-5)[1]


class BiasGradient(Function):
    """The part of a linear layer's function that computes the gradient of its bias: the sum of the
    outputs' gradient over all rows. (The matrix product itself adds the bias, which is zero in this
    measurement.)"""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Return x."""
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        """Return the gradient of x, and sum it over the rows."""
        sum_of_rows(dy.flatten(0, -2), torch.float32)
        return dy


class GeluInTriton(Function):
    """GELU of x + bias by ptdmpi's kernels in Triton, which also compute the bias's gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor) -> Tensor:
        """Return GELU's tanh form of x + bias."""
        from ptdmpi.model.kernels.fused import gelu as fused

        ctx.save_for_backward(x, bias)
        return fused.forward(x, bias, exact=False)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        """Return the gradient of x."""
        from ptdmpi.model.kernels.fused import gelu as fused

        x, bias = ctx.saved_tensors
        return fused.backward(x, bias, dy, exact=False, trains=True)[0], None


def dropout_formula(x: Tensor, keep: Tensor) -> Tensor:
    """Return dropout of `x` [tokens, batch, hidden] with the bool mask `keep` [tokens, batch,
    hidden]."""
    return x * keep / (1.0 - DROPPED)


def dropout_by(kernels: Kernels, samples: Tensor, x: Tensor, keep: Tensor) -> Tensor:
    """Return dropout of `x` [tokens, batch, hidden] for the `samples` [batch]. This function
    computes a mask that equals `keep`, so the argument `keep` is not used."""
    stream = RandomStream.of(1, 1, samples.to(x.device))
    return drop_hidden(x, stream, DROPPED, kernels)


def loss_formula(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the sum of the losses for `logits` [tokens, batch, vocabulary], computed by torch."""
    wide = logits.flatten(0, 1).float()
    return F.cross_entropy(wide, labels.flatten(), reduction="sum")


class SmallKernel(NamedTuple):
    """A small kernel to be measured: ptdmpi's implementation, the formula in torch's operations,
    and float32 inputs on the host. A gradient is computed only for the first input. `triton` is
    ptdmpi's implementation in Triton, if there is such an implementation."""

    name: str
    ours: Callable[..., Tensor]
    formula: Callable[..., Tensor]
    inputs: tuple[Tensor, ...]
    triton: Callable[..., Tensor] | None = None


IN_TRITON = Kernels(triton=KINDS)
DROPPED = 0.1  # The rate of the measured dropout.


def _small(model: ModelConfig, micro_size: int, vocab_size: int) -> Iterator[SmallKernel]:
    s = model.seq_length
    b = micro_size
    heads = torch.randn(s, b, 2 * model.heads, model.head_size)
    table = rotary_table(model, torch.device("cpu"))
    in_triton = partial(rotate, kernels=IN_TRITON)
    yield SmallKernel("RoPE", rotate, rope_formula, (heads, *table), in_triton)
    opened = torch.randn(s, b, 2 * model.ffn_hidden)
    yield SmallKernel(
        "SwiGLU",
        lambda x: gated(x, "swiglu"),
        swiglu_formula,
        (opened,),
        lambda x: gated(x, "swiglu", IN_TRITON),
    )
    yield SmallKernel(
        "GELU",
        lambda x, bias: gelu(BiasGradient.apply(x), "gelu"),
        lambda x, bias: F.gelu(x + bias, approximate="tanh"),
        (torch.randn(s, b, model.ffn_hidden), torch.zeros(model.ffn_hidden)),
        GeluInTriton.apply,
    )
    hidden = torch.randn(s, b, model.hidden)
    yield SmallKernel(
        "RMSNorm",
        lambda x, weight: rms_norm(x, weight, 1e-5),
        rms_norm_formula,
        (hidden, torch.ones(model.hidden)),
        rms_norm_in_triton,
    )
    samples = torch.arange(b)
    yield SmallKernel(
        "dropout",
        partial(dropout_by, USUAL, samples),
        dropout_formula,
        (hidden, RandomStream.of(1, 1, samples).hidden_mask(hidden.shape, DROPPED)),
        partial(dropout_by, IN_TRITON, samples),
    )
    axis = TensorAxis(World().split(training_grid())["tensor"], False)
    logits = torch.randn(s, b, vocab_size)
    labels = torch.randint(vocab_size, (s, b))

    def loss(logits: Tensor, labels: Tensor, kernels: Kernels = USUAL) -> Tensor:
        own = logits.clone()  # the loss overwrites its input
        return cross_entropy(own, labels, None, axis, kernels=kernels)

    in_triton = partial(loss, kernels=IN_TRITON)
    yield SmallKernel("loss", loss, loss_formula, (logits, labels), in_triton)


def small_kernels(
    device: torch.device, model: ModelConfig, micro_size: int, vocab_size: int
) -> Iterator[Row]:
    """Yield rows for the functions of a layer that consist of several operations, forward and
    backward in bfloat16. A function has a row for ptdmpi's implementation ("ours"), for the
    operations of its formula one after the other ("formula"), and for Inductor, which fuses these
    operations. It also has a row for ptdmpi's kernel in Triton, if there is such a kernel and
    Triton is available. A row has the seconds, and the difference from the result of the formula in
    float32. The last rows are those of AdamW's update."""
    in_triton = device.type == "cuda" and not missing_for_triton()
    for kernel in _small(model, micro_size, vocab_size):
        wide = [tensor.to(device) for tensor in kernel.inputs]
        exact = kernel.formula(*wide)
        inputs = [tensor.bfloat16() if tensor.is_floating_point() else tensor for tensor in wide]
        ways = {
            "ours": kernel.ours,
            "formula": kernel.formula,
            "Inductor": timing.compiled(kernel.formula),
        }
        if kernel.triton is not None and in_triton:
            ways["Triton"] = kernel.triton
        for way, function in ways.items():
            measure = partial(_forward_and_backward, device, function, inputs, exact)
            yield f"{kernel.name}, {way}", measure
    updated = 2 * model.hidden * model.ffn_hidden
    yield "AdamW, ours", lambda: _update(update_by_torch, updated, device)
    if in_triton:
        yield "AdamW, Triton", lambda: _update(update_in_triton, updated, device)


def _forward_and_backward(
    device: torch.device, function: Callable[..., Tensor], inputs: Sequence[Tensor], exact: Tensor
) -> dict[str, Any]:
    x = inputs[0].requires_grad_()
    # a loss is a sum in float32, so its gradient is also float32
    dtype = torch.float32 if exact.dim() == 0 else x.dtype
    gradient = torch.ones_like(exact, dtype=dtype)

    def work() -> None:
        torch.autograd.grad(function(*inputs), x, gradient)

    apart = _distance(function(*inputs), exact)
    return {"s": seconds_of(work, device), "apart": apart}


RULE = OptimizerConfig()  # The optimizer whose update is measured.
RATE, CLIPPED = 1e-3, 0.5  # The learning rate, and the factor of the gradients.


def update_by_torch(group: Alike, updates: Tensor) -> None:
    """Clip the gradients, do the update of AdamW, write the weights and set the gradients to zero,
    by torch's operations. `updates` (float32 scalar) is the number of earlier updates."""
    torch._foreach_mul_(group.gradients, CLIPPED)
    update(RULE, group, RATE, updates)
    for weights, masters, gradients in zip(
        group.weights, group.masters, group.gradients, strict=True
    ):
        weights.copy_(masters)
        gradients.zero_()


def update_in_triton(group: Alike, updates: Tensor) -> None:
    """Do the same as `update_by_torch` for a first update, by ptdmpi's kernel in Triton."""
    update_in_one_pass(RULE, group, RATE, 0, factor=CLIPPED)


def _update(
    work: Callable[[Alike, Tensor], None], elements: int, device: torch.device
) -> dict[str, Any]:
    """Return the row of an update of `elements` master weights in float32, and of weights in
    bfloat16. The master weights are zero at first. The weights after the update are then the update
    alone, so larger weights cannot hide its error."""
    updates = torch.zeros((), device=device)
    gradient = torch.randn(elements).to(device)
    flats = [torch.zeros(elements, device=device) for _ in range(4)]
    # the first moment divided by the root of the second moment is then the sign of the gradient
    small = CLIPPED * gradient
    exact = -RATE * small / (small.abs() + RULE.eps)
    flats[1].copy_(gradient)
    group = Alike(
        masters=[flats[0]],
        weights=[flats[0].bfloat16()],
        gradients=[flats[1]],
        moments=([flats[2]], [flats[3]]),
        decay=RULE.weight_decay,
    )
    work(group, updates)
    apart = _distance(group.weights[0], exact)
    return {"s": seconds_of(lambda: work(group, updates), device), "apart": apart}
