"""What a layer computes between its collectives, as quick as the device allows and keeping little.

A CPU without bfloat16 or float16 instructions falls back to scalar code for products of those types
(measured on an AVX2 machine: 0.3 to 8 GFLOP/s where float32 reaches 40). There the operands are
widened to float32 first and the result is rounded once: the values that hardware with float32
accumulators gives.

Where PyTorch composes an operation of several on a CPU, each of them keeps what its own backward
wants; such an operation is one Function here that keeps its input alone.
"""

from collections.abc import Iterator
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

HALF_TYPES = (torch.bfloat16, torch.float16)


@cache
def widens(device_type: str, dtype: torch.dtype) -> bool:
    """Whether products of this type are taken in float32 on this device."""
    if device_type != "cpu" or dtype not in HALF_TYPES:
        return False
    capabilities = torch.cpu.get_capabilities()
    native = {
        torch.bfloat16: ("avx512_bf16", "amx_bf16"),
        torch.float16: ("avx512_fp16", "amx_fp16"),
    }
    return not any(capabilities.get(name, False) for name in native[dtype])


def _wide(x: Tensor) -> Tensor:
    return x.float() if widens(x.device.type, x.dtype) else x


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + b: x [..., i], weight [o, i], bias [o] -> [..., o]."""
    if not widens(x.device.type, x.dtype):
        return F.linear(x, weight, bias)
    bias = None if bias is None else bias.float()
    return F.linear(x.float(), weight.float(), bias).to(x.dtype)


def input_gradient(dy: Tensor, weight: Tensor) -> Tensor:
    """dy W: dy [..., o], weight [o, i] -> [..., i]."""
    return (_wide(dy) @ _wide(weight)).to(dy.dtype)


def add_weight_gradient(total: Tensor, dy: Tensor, x: Tensor) -> None:
    """total += dy^T x over the positions: dy [..., o], x [..., i]; total [o, i] in float32 up."""
    dy = _wide(dy.reshape(-1, dy.shape[-1]))
    x = _wide(x.reshape(-1, x.shape[-1]))
    if total.dtype == dy.dtype:
        total.addmm_(dy.t(), x)
    else:
        total += dy.t() @ x


# PyTorch's CPU kernel skips what lies above the diagonal only in steps of 512 keys. Taken in blocks
# of so many queries, each on the keys up to its end, s = 512 costs five eighths.
QUERY_BLOCK = 128


@cache
def _future(queries: int, keys: int, dtype: torch.dtype) -> Tensor:
    """-inf above the diagonal that ends in the lower right corner: [queries, keys], to be added."""
    future = torch.ones(queries, keys, dtype=torch.bool).triu(keys - queries + 1)
    return torch.zeros(queries, keys, dtype=dtype).masked_fill(future, -torch.inf)


class _BlockedAttention(Function):
    """Causal attention on a CPU in blocks of queries; keeps its inputs, its result and a number for
    each row, as the unblocked kernel does.
    """

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, sums = torch.empty_like(q), []
        for begin, end, mask in _query_blocks(q):
            out[:, :, begin:end], sum_of_exponentials = (
                torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                    q[:, :, begin:end], k[:, :, :end], v[:, :, :end], 0.0, False, attn_mask=mask
                )
            )
            sums.append(sum_of_exponentials)
        ctx.save_for_backward(q, k, v, out, *sums)
        return out

    @staticmethod
    def backward(ctx, dout: Tensor):
        q, k, v, out, *sums = ctx.saved_tensors
        dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for (begin, end, mask), sum_of_exponentials in zip(_query_blocks(q), sums, strict=True):
            parts = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                dout[:, :, begin:end],
                q[:, :, begin:end],
                k[:, :, :end],
                v[:, :, :end],
                out[:, :, begin:end],
                sum_of_exponentials,
                0.0,
                False,
                attn_mask=mask,
            )
            dq[:, :, begin:end] = parts[0]
            dk[:, :, :end] += parts[1]
            dv[:, :, :end] += parts[2]
        return dq, dk, dv


def _query_blocks(q: Tensor) -> Iterator[tuple[int, int, Tensor]]:
    """Where each block of q [b, heads, s, head size] begins and ends, and its mask."""
    seq_length = q.shape[2]
    for begin in range(0, seq_length, QUERY_BLOCK):
        end = min(begin + QUERY_BLOCK, seq_length)
        yield begin, end, _future(QUERY_BLOCK, seq_length, q.dtype)[begin - end :, -end:]


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """softmax(q k^T / sqrt(head size)) v, each position seeing itself and what is before it.

    q and the result are [b, heads, s, head size], k and v have as many heads or a divisor of them
    (grouped queries); PyTorch picks the kernel (FlashAttention where the device has it).
    """
    grouped = q.shape[1] != k.shape[1]
    if q.device.type == "cpu" and not grouped and q.shape[2] > QUERY_BLOCK:
        return _BlockedAttention.apply(_wide(q), _wide(k), _wide(v)).to(q.dtype)
    out = F.scaled_dot_product_attention(
        _wide(q), _wide(k), _wide(v), is_causal=True, enable_gqa=grouped
    )
    return out.to(q.dtype)


def masked_attention(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    """Attention of each query to the keys that `seen` (bool [b, 1, queries, keys]) lets it see."""
    grouped = q.shape[1] != k.shape[1]
    out = F.scaled_dot_product_attention(
        _wide(q), _wide(k), _wide(v), attn_mask=seen, enable_gqa=grouped
    )
    return out.to(q.dtype)


def product(a: Tensor, b: Tensor) -> Tensor:
    """a b, batched."""
    return (_wide(a) @ _wide(b)).to(a.dtype)


class _RmsNorm(Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        scale = wide.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return (wide * scale).mul_(weight).to(x.dtype)

    @staticmethod
    def backward(ctx, dy: Tensor):
        x, weight, scale = ctx.saved_tensors
        normed = x * scale
        dnormed = dy * weight.to(scale.dtype)
        dweight = (dy * normed).flatten(0, -2).sum(0)
        projection = (dnormed * normed).mean(-1, keepdim=True)
        dx = dnormed.sub_(normed.mul_(projection)).mul_(scale)
        return dx.to(x.dtype), dweight.to(weight.dtype), None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dim, in float32 at least.

    Zhang and Sennrich 2019 (arXiv 1910.07467), equation 4.
    """
    if x.device.type == "cpu":
        return _RmsNorm.apply(x, weight, eps)
    return F.rms_norm(x, weight.shape, weight, eps)


class _SwiGlu(Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        gate, value = x.chunk(2, dim=-1)
        return F.silu(gate).mul_(value)

    @staticmethod
    def backward(ctx, dy: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        gate, value = x.chunk(2, dim=-1)
        dx = torch.empty_like(x)
        dgate, dvalue = dx.chunk(2, dim=-1)
        torch.mul(dy, F.silu(gate), out=dvalue)
        torch.ops.aten.silu_backward.grad_input(dy * value, gate, grad_input=dgate)
        return dx


def swiglu(x: Tensor) -> Tensor:
    """silu(gate) * value of x = (gate, value): [..., 2 f] -> [..., f] (Shazeer 2020)."""
    return _SwiGlu.apply(x)
