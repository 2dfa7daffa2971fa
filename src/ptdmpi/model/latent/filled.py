"""PyTorch's fused kernels of attention, applied to values that are smaller than keys.

Both the CPU kernel and FlashAttention need values with the head size of keys, d. These kernels get
values that are filled up with zeros from v to d elements. The last d - v elements of their outputs
are zeros, and are cut off. Only tensors without these zeros are saved for the backward, which fills
the saved tensors up again.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

FLASH_HEAD_SIZE = 256  # largest head size that FlashAttention supports


def filled(x: Tensor, size: int) -> Tensor:
    """Return the tensor x [..., v] with zeros after its last dim: [..., size]. If v is `size`,
    return x itself."""
    missing = size - x.shape[-1]
    return F.pad(x, (0, missing)) if missing else x


def cut(out: Tensor, size: int) -> Tensor:
    """Return the outputs of the heads, `out` [b, heads, s, d], cut off after `size` elements. The
    result [b, heads, s, size] has the positions as its first dim in memory, then sequences and
    heads. If `size` is d, return `out` itself."""
    if out.shape[-1] == size:
        return out
    taken = out[..., :size].permute(2, 0, 1, 3)
    return taken.clone(memory_format=torch.contiguous_format).permute(1, 2, 0, 3)


def empty_outputs(q: Tensor, v: Tensor) -> Tensor:
    """Return memory for the outputs of attention [b, heads, s, size of a head's values], with the
    type of the queries q [b, heads, s, d]. The values are v [b, key heads, keys, size]."""
    b, heads, s, size = q.shape
    if v.shape[3] == size:
        return torch.empty_like(q)
    return q.new_empty(s, b, heads, v.shape[3]).permute(1, 2, 0, 3)


def flash_takes(head_size: int) -> bool:
    """Return True if FlashAttention, called directly, supports a head size. A direct call does not
    pad the head size to a supported one (flash_api.cpp)."""
    return head_size % 8 == 0 and head_size <= FLASH_HEAD_SIZE


class FilledWork(NamedTuple):
    """The settings of attention with filled values: whether it is causal, and the scale of the
    scores."""

    causal: bool
    scale: float


class FilledAttention(Function):
    """The autograd Function softmax(scores) v. The queries q and the keys k are [b, heads, s, d].
    The values v and the result are [b, heads, s, size of a head's values]. There must be as many
    key heads as query heads. The second result is the log-sum-exp of the scores [b, heads, s],
    which has no gradient. On a GPU, the type must be a 16-bit type, and `flash_takes` must be True
    for d."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, work: FilledWork
    ) -> tuple[Tensor, Tensor]:
        values = filled(v, q.shape[3])
        rest: list[Any] = []
        if q.device.type == "cpu":
            out, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                q, k, values, 0.0, work.causal, scale=work.scale
            )
        else:
            # `rest` has the numbers of positions and the state of the dropout, which the kernel of
            # the backward needs
            out, sums, *rest, _ = torch.ops.aten._scaled_dot_product_flash_attention(
                q, k, values, 0.0, work.causal, False, scale=work.scale
            )
        out = cut(out, v.shape[3])
        ctx.work, ctx.rest = work, rest
        ctx.mark_non_differentiable(sums)
        ctx.save_for_backward(q, k, v, out, sums)
        return out, sums

    @staticmethod
    def backward(ctx: Any, dout: Tensor, *nothing: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, out, sums = ctx.saved_tensors
        work: FilledWork = ctx.work
        size = q.shape[3]
        given = filled(dout, size), q, k, filled(v, size), filled(out, size), sums
        if q.device.type == "cpu":
            dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                *given, 0.0, work.causal, scale=work.scale
            )
        else:
            *lengths, seed, offset = ctx.rest
            dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_backward(
                *given, *lengths, 0.0, work.causal, seed, offset, scale=work.scale
            )
        return dq, dk, dv[..., : v.shape[3]], None
