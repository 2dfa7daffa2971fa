"""What a layer computes between its collectives, as quick as the device allows and keeping little.

A CPU without bfloat16 or float16 instructions falls back to scalar code for products of those types
(measured on an AVX2 machine: 0.3 to 8 GFLOP/s where float32 reaches 40). There the operands are
widened to float32 first and the result is rounded once: the values that hardware with float32
accumulators gives.

Where PyTorch composes an operation of several on a CPU, each of them keeps what its own backward
wants; such an operation is one Function here that keeps its input alone.
"""

import importlib.util
import inspect
from collections.abc import Callable, Iterator
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from ptdmpi.model.documents import Documents

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
    """Attention on a CPU in blocks of queries; keeps its inputs, its result and a number for each
    row, as the unblocked kernel does.
    """

    @staticmethod
    def forward(
        ctx, q: Tensor, k: Tensor, v: Tensor, causal: bool, documents: Documents | None
    ) -> Tensor:
        out, sums = torch.empty_like(q), []
        for queries, keys, mask in _blocks(q, causal, documents):
            out[queries], sum_of_exponentials = (
                torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                    q[queries], k[keys], v[keys], 0.0, False, attn_mask=mask
                )
            )
            sums.append(sum_of_exponentials)
        ctx.blocks = (causal, documents)
        ctx.save_for_backward(q, k, v, out, *sums)
        return out

    @staticmethod
    def backward(ctx, dout: Tensor):
        q, k, v, out, *sums = ctx.saved_tensors
        dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        blocks = _blocks(q, *ctx.blocks)
        for (queries, keys, mask), sum_of_exponentials in zip(blocks, sums, strict=True):
            parts = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                dout[queries],
                q[queries],
                k[keys],
                v[keys],
                out[queries],
                sum_of_exponentials,
                0.0,
                False,
                attn_mask=mask,
            )
            dq[queries] = parts[0]
            dk[keys] += parts[1]
            dv[keys] += parts[2]
        return dq, dk, dv, None, None


Place = tuple[slice, slice, slice]  # rows, heads, positions


def _blocks(
    q: Tensor, causal: bool, documents: Documents | None
) -> Iterator[tuple[Place, Place, Tensor | None]]:
    """Blocks of queries of q [b, heads, s, head size], the keys that each sees, and its mask."""
    every, seq_length = slice(None), q.shape[2]
    whole = [(every, 0, seq_length)]
    if documents is not None:
        whole = [(slice(row, row + 1), begin, end) for row, begin, end in documents.pieces]
    for rows, begin, end in whole:
        for first in range(begin, end, QUERY_BLOCK) if causal else [begin]:
            last = min(first + QUERY_BLOCK, end) if causal else end
            mask = None
            if causal:
                future = _future(QUERY_BLOCK, seq_length, q.dtype)
                mask = future[first - last :, begin - last :]
            yield (rows, every, slice(first, last)), (rows, every, slice(begin, last)), mask


def attention(
    q: Tensor, k: Tensor, v: Tensor, causal: bool = True, documents: Documents | None = None
) -> Tensor:
    """softmax(q k^T / sqrt(head size)) v, each position seeing itself and what is before it in its
    document; not `causal`: all of its document.

    q and the result are [b, heads, s, head size], k and v have as many heads or a divisor of them
    (grouped queries); PyTorch picks the kernel (FlashAttention where the device has it).
    """
    grouped = q.shape[1] != k.shape[1]
    if documents is not None and q.device.type != "cpu":
        return _attention_of_documents(q, k, v, causal, documents)
    if documents is not None and grouped:
        k, v = (part.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for part in (k, v))
    blocked = causal and not grouped and q.device.type == "cpu" and q.shape[2] > QUERY_BLOCK
    if blocked or documents is not None:
        out = _BlockedAttention.apply(_wide(q), _wide(k), _wide(v), causal, documents)
    else:
        out = F.scaled_dot_product_attention(
            _wide(q), _wide(k), _wide(v), is_causal=causal, enable_gqa=grouped
        )
    return out.to(q.dtype)


def masked_attention(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    """Attention of each query to the keys that `seen` (bool [b, 1, queries, keys]) lets it see."""
    grouped = q.shape[1] != k.shape[1]
    out = F.scaled_dot_product_attention(
        _wide(q), _wide(k), _wide(v), attn_mask=seen, enable_gqa=grouped
    )
    return out.to(q.dtype)


@cache
def _packed_attention() -> Callable[..., Tensor] | None:
    """PyTorch's attention of sequences laid end to end; None before it had grouped queries."""
    if importlib.util.find_spec("torch.nn.attention.varlen") is None:
        return None
    from torch.nn.attention.varlen import varlen_attn

    known = inspect.signature(varlen_attn).parameters.keys()
    return varlen_attn if {"window_size", "enable_gqa"} <= known else None


def _attention_of_documents(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, documents: Documents
) -> Tensor:
    """On a device: FlashAttention of the documents laid end to end, which takes half types only;
    else under a mask."""
    grouped = q.shape[1] != k.shape[1]
    packed_attention = _packed_attention()
    if packed_attention is None or q.dtype not in HALF_TYPES:
        seen = ~documents.others()
        if causal:
            seen = seen.tril()
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=grouped)
    b, _, s, _ = q.shape
    packed = (part.transpose(1, 2).flatten(0, 1) for part in (q, k, v))  # [b s, heads, head size]
    out = packed_attention(
        *packed,
        documents.offsets,
        documents.offsets,
        documents.longest,
        documents.longest,
        window_size=(-1, 0) if causal else (-1, -1),
        enable_gqa=grouped,
    )
    return out.unflatten(0, (b, s)).transpose(1, 2)


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
