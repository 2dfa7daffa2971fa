"""Kernels on one GPU: how quick, and how far from float32, by each way that there is."""

import contextlib
import importlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu import timing
from benchmarks.gpu.reasons import why_not
from benchmarks.gpu.timing import Row, seconds_of
from ptdmpi.comm.world import World
from ptdmpi.config import ModelConfig
from ptdmpi.model import kernels
from ptdmpi.model.kernels import choice
from ptdmpi.model.kernels.activation import gated
from ptdmpi.model.kernels.rope import rotate
from ptdmpi.model.loss import cross_entropy
from ptdmpi.model.tensor_parallel import TensorAxis
from ptdmpi.model.transformer import rotary_table
from ptdmpi.plan.layout.grid import training_grid


def weight_gradients(device: torch.device, size: int = 4096) -> dict[str, Any]:
    """A weight's gradient added in float32 by the product itself, and by a second kernel: seconds,
    and how far each is from the product in float32."""
    generator = torch.Generator().manual_seed(1)
    dy, x = (torch.randn(size // 2, size, generator=generator).bfloat16() for _ in "ab")
    dy, x = dy.to(device), x.to(device)
    exact = dy.float().t() @ x.float()
    rows: dict[str, Any] = {}
    for way, add in {
        "adds": lambda total: torch.addmm(total, dy.t(), x, out_dtype=torch.float32, out=total),
        "rounds": lambda total: total.add_(dy.t() @ x),
        "as chosen": lambda total: kernels.add_weight_gradient(total, dy, x),
    }.items():
        total = torch.zeros(size, size, device=device)
        try:
            add(total)
            apart = float((total - exact).abs().max() / exact.abs().max())
            rows[way] = {"s": seconds_of(partial(add, total), device), "apart": apart}
        except RuntimeError as error:  # a library without such a product
            rows[way] = {"skipped": str(error).partition("\n")[0]}
    return rows


def attentions(device: torch.device, shape: tuple[int, ...] = (2, 16, 2048, 128)) -> dict[str, Any]:
    """Causal attention in bfloat16, forward and backward, by each way that the library has here:
    seconds, and how far its result is from that in float32."""
    attention: Any = importlib.import_module("torch.nn.attention")
    q, k, v = (torch.randn(shape).bfloat16().to(device) for _ in "qkv")
    with attention.sdpa_kernel(attention.SDPBackend.MATH):
        wide = (one.float() for one in (q, k, v))
        exact = F.scaled_dot_product_attention(*wide, is_causal=True)
    for one in (q, k, v):
        one.requires_grad_()

    def there() -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    rows: dict[str, Any] = {}
    ways = {**choice.BACKENDS, "efficient": "EFFICIENT_ATTENTION"}
    for way, name in ways.items():
        with contextlib.ExitStack() as restored:
            try:
                if way == "fa3":
                    attention.activate_flash_attention_impl("FA3")
                    restored.callback(attention.restore_flash_attention_impl)
                restored.enter_context(attention.sdpa_kernel(getattr(attention.SDPBackend, name)))
                apart = float((there().detach().float() - exact).abs().max() / exact.abs().max())
                s = seconds_of(lambda: there().sum().backward(), device)
                rows[way] = {"s": s, "apart": apart}
            except (RuntimeError, ImportError, ValueError) as error:
                rows[way] = {"skipped": str(error).partition("\n")[0]}
    return rows


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE by its formula, in torch's own operations."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def opened(x: Tensor) -> Tensor:
    """SwiGLU by its formula."""
    gate, value = x.chunk(2, dim=-1)
    return F.silu(gate) * value


def normed(x: Tensor, weight: Tensor) -> Tensor:
    """RMSNorm by its formula."""
    wide = x.float()
    return (wide * (wide.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight).to(x.dtype)


def lost(logits: Tensor, labels: Tensor) -> Tensor:
    """The sum of the tokens' losses, by the library."""
    wide = logits.flatten(0, 1).float()
    return F.cross_entropy(wide, labels.flatten(), reduction="sum")


Ways = dict[str, Callable[..., Tensor]]


def _small(model: ModelConfig, micro_size: int, vocab_size: int) -> dict[str, tuple[Ways, Any]]:
    """By name the ways of each small kernel, of which the last is its formula, and what it takes:
    on the host, in float32; the first of it has a gradient."""
    s, b, size, h = model.seq_length, micro_size, model.head_size, model.hidden
    turning = rotary_table(model, torch.device("cpu"))
    labels = torch.randint(vocab_size, (s, b))
    axis = TensorAxis(World().split(training_grid())["tensor"], False)

    def ours(logits: Tensor, labels: Tensor) -> Tensor:
        return cross_entropy(logits.clone(), labels, None, axis)  # which it overwrites

    return {
        "RoPE": (
            {"ours": rotate, "formula": turned},
            (torch.randn(s, b, 2 * model.heads, size), *turning),
        ),
        "SwiGLU": (
            {"ours": lambda x: gated(x, "swiglu"), "formula": opened},
            (torch.randn(s, b, 2 * model.ffn_hidden),),
        ),
        "RMSNorm": (
            {"ours": lambda x, weight: kernels.rms_norm(x, weight, 1e-5), "formula": normed},
            (torch.randn(s, b, h), torch.ones(h)),
        ),
        "loss": ({"ours": ours, "formula": lost}, (torch.randn(s, b, vocab_size), labels)),
    }


def _there_and_back(call: Callable[[], Tensor], x: Tensor, back: Tensor) -> None:
    torch.autograd.grad(call(), x, back)


def small_kernels(
    device: torch.device, model: ModelConfig, micro_size: int, vocab_size: int
) -> Iterator[Row]:
    """What a layer composes of several operations, there and back in bfloat16: as ours does, by the
    formula's operations one by one, and as Inductor fuses them: seconds, and how far each result is
    from the formula's in float32."""
    for name, (ways, inputs) in _small(model, micro_size, vocab_size).items():
        there = [one.to(device) for one in inputs]
        exact = ways["formula"](*there)
        given = [one.bfloat16() if one.is_floating_point() else one for one in there]
        x = given[0].requires_grad_()
        back = torch.ones_like(exact, dtype=torch.float32 if exact.dim() == 0 else x.dtype)
        fused = {"Inductor": timing.compiled(ways["formula"])}
        for way, function in {**ways, **fused}.items():
            call = partial(function, *given)
            try:
                apart = float((call().detach().float() - exact).abs().max() / exact.abs().max())
                s = seconds_of(partial(_there_and_back, call, x, back), device)
                yield f"{name}, {way}", {"s": s, "apart": apart}
            except RuntimeError as error:  # such as a compiler that is not here
                yield f"{name}, {way}", why_not(error)
