"""Operations of a pretended device that the host has otherwise, or not at all."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from ptdmpi.model.kernels import Kernels, host

aten = torch.ops.aten


def fused(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **named: Any,
) -> Tensor:
    """Any fused kernel, in place of torch's choice, which knows no such device."""
    kernel = aten._scaled_dot_product_fused_attention_overrideable
    return kernel(q, k, v, attn_mask, dropout_p, is_causal, scale=named.get("scale"))[0]


def _whole_heads(q: Tensor, *parts: Tensor) -> list[Tensor]:
    """Keys and values for each head, where heads share them."""
    return [part.repeat_interleave(q.shape[1] // part.shape[1], dim=1) for part in parts]


def _added(q: Tensor, mask: Tensor | None) -> Tensor | None:
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros(mask.shape, dtype=q.dtype).masked_fill(~mask, -torch.inf)


def _attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None, *rest: Any, **named: Any
) -> tuple[Any, ...]:
    """What a fused kernel keeps: its inputs, its result, and a number for each row."""
    if q.device.type == "meta":
        sums = torch.empty(q.shape[:3], dtype=torch.float32, device="meta")
        out = torch.empty_like(q)
    else:
        kernel = aten._scaled_dot_product_flash_attention_for_cpu
        mask, causal = _added(q, bias), len(rest) > 1 and rest[1]  # no argument: its default
        whole = _whole_heads(q, k, v)
        out, sums = kernel(q, *whole, 0.0, causal, attn_mask=mask, scale=named.get("scale"))
    nothing = torch.empty(0, dtype=torch.int64, device=q.device)
    return out, sums, nothing, nothing, q.shape[2], k.shape[2], nothing, nothing, nothing


def _attention_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, *rest: Any, **named: Any
) -> tuple[Any, ...]:
    out, sums, causal = rest[1], rest[2], rest[8]
    if q.device.type == "meta":
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), None
    kernel = aten._scaled_dot_product_flash_attention_for_cpu_backward
    mask, whole = _added(q, bias), _whole_heads(q, k, v)
    scale = named.get("scale")
    dq, *found = kernel(dout, q, *whole, out, sums, 0.0, causal, attn_mask=mask, scale=scale)
    dk, dv = (
        one.unflatten(1, (part.shape[1], -1)).sum(2)
        for one, part in zip(found, (k, v), strict=True)
    )
    return dq, dk, dv, None


def _addmm(total: Tensor, a: Tensor, b: Tensor, *args: Any, out: Any = None, **kwargs: Any) -> Any:
    """With `out_dtype`, which only CUDA's has: operands in a half type, sums in float32."""
    dtype = args[0] if args else kwargs.pop("out_dtype", None)
    if dtype is None:
        return torch.addmm(total, a, b, **kwargs, **({} if out is None else {"out": out}))
    assert total.dtype == dtype and a.dtype == b.dtype and a.dtype != dtype
    assert tuple(total.shape) == (a.shape[0], b.shape[1])
    assert not kwargs
    made = total + torch.mm(a.to(dtype), b.to(dtype))  # as the two apart, to the bits
    return made if out is None else out.copy_(made)


OWN: dict[str, Callable[..., Any]] = {
    "_scaled_dot_product_fused_attention_overrideable": _attention,
    "_scaled_dot_product_fused_attention_overrideable_backward": _attention_backward,
    "addmm": _addmm,
}


@contextlib.contextmanager
def adding() -> Iterator[None]:
    """The host adds products of half types to sums in float32 as a GPU of CUDA does, for as long as
    it lasts: by the operation of the library that only CUDA has a kernel of."""
    with (
        torch.library._scoped_library("aten", "IMPL") as library,
        mock.patch.object(host, "adds_wide", lambda device_type: True),
        mock.patch.object(Kernels, "widens", lambda self, device_type, dtype: False),
    ):
        library.impl("addmm.dtype", _wide, "CPU")
        library.impl("addmm.dtype_out", _wide, "CPU")
        library.impl("mm.dtype", _wide_product, "CPU")
        yield


def _wide(total: Tensor, a: Tensor, b: Tensor, dtype: torch.dtype, **named: Any) -> Tensor:
    ADDED.append(tuple(total.shape))
    return _addmm(total, a, b, dtype, **named)


def _wide_product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    ADDED.append((a.shape[0], b.shape[1]))
    return torch.mm(a.to(dtype), b.to(dtype))


ADDED: list[tuple[int, ...]] = []  # the shapes of sums that were added to so
