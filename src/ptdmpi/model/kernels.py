"""Products of matrices in the compute type, as quick as the device allows.

A CPU without bfloat16 or float16 instructions falls back to scalar code for products of those types
(measured on an AVX2 machine: 0.3 to 8 GFLOP/s where float32 reaches 40). There the operands are
widened to float32 first and the result is rounded once: the values that hardware with float32
accumulators gives.
"""

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

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
    """total += dy^T x over all positions: dy [..., o], x [..., i], total [o, i], float32 at least."""
    dy = _wide(dy.reshape(-1, dy.shape[-1]))
    x = _wide(x.reshape(-1, x.shape[-1]))
    if total.dtype == dy.dtype:
        total.addmm_(dy.t(), x)
    else:
        total += dy.t() @ x


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """softmax(q k^T / sqrt(head size)) v, each position seeing itself and what is before it.

    q, k, v and the result are [b, heads, s, head size]; PyTorch picks the kernel (FlashAttention
    where the device has it).
    """
    out = F.scaled_dot_product_attention(_wide(q), _wide(k), _wide(v), is_causal=True)
    return out.to(q.dtype)


def product(a: Tensor, b: Tensor) -> Tensor:
    """a b, batched."""
    return (_wide(a) @ _wide(b)).to(a.dtype)
