"""Causal ring attention in plain torch, with which the benchmark compares ptdmpi's context
parallelism.

torch's own context parallelism supports only the kernels of GPUs (torch 2.13,
distributed/tensor/experimental/_context_parallel). This module uses the same method as torch and
ring-flash-attention. Keys and values are sent around a ring over gloo while the rank computes with
torch's fused kernel for CPUs. The results for the keys of different ranks are merged by their
log-sum-exp in float32. The sequence is cut into 2c chunks for c ranks, and each rank has two chunks
in zigzag order.
"""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
attend_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def positions(rank: int, ranks: int, length: int) -> Tensor:
    """Return the positions of the two chunks of a sequence that a rank has, in ascending order."""
    chunks = torch.arange(length).chunk(2 * ranks)
    return torch.cat((chunks[rank], chunks[2 * ranks - 1 - rank]))


class _Block(NamedTuple):
    """A block of attention: this rank's queries attend to the keys of one rank. The block has the
    slices of the queries and of the keys that are computed, and a flag whether the mask is
    causal."""

    queries: slice
    keys: slice
    causal: bool


def _block(rank: int, source: int, count: int) -> _Block:
    whole = slice(None)
    if source == rank:
        return _Block(whole, whole, True)
    # all queries are after the first chunk of the keys, and before the second chunk
    if source < rank:
        return _Block(whole, slice(count // 2), False)
    return _Block(slice(count // 2, None), whole, False)


class _Travelling:
    """A tensor that is being sent to the next rank of the ring, while the tensor of the previous
    rank arrives."""

    def __init__(self, tensor: Tensor) -> None:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        self.sent = tensor  # this attribute keeps the tensor alive until it is sent
        self.received = torch.empty_like(tensor)
        sends = dist.P2POp(dist.isend, tensor, (rank + 1) % ranks)
        receives = dist.P2POp(dist.irecv, self.received, (rank - 1) % ranks)
        self.works = dist.batch_isend_irecv([sends, receives])

    def wait(self) -> Tensor:
        """Wait for the tensor of the previous rank, and return it."""
        for work in self.works:
            work.wait()
        return self.received


class RingAttention(Function):
    """An autograd function that computes softmax(q k^T) v, for q, k and v [batch, heads, tokens /
    ranks, head size] at this rank's `positions`."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return the attention of this rank's queries to the keys of all ranks."""
        rank, ranks = dist.get_rank(), dist.get_world_size()
        total = torch.zeros(q.shape, dtype=torch.float32)
        sums = torch.full(q.shape[:3], -torch.inf)
        own = both = torch.stack((k, v))
        for step in range(ranks):
            travelling = _Travelling(both) if step + 1 < ranks else None
            queries, keys, causal = _block(rank, (rank - step) % ranks, q.shape[2])
            part, part_sums = attend(
                q[:, :, queries], both[0, :, :, keys], both[1, :, :, keys], 0.0, causal
            )
            before = sums[:, :, queries]
            after = torch.logaddexp(before, part_sums)
            total[:, :, queries] *= (before - after).exp()[..., None]
            total[:, :, queries] += part.float() * (part_sums - after).exp()[..., None]
            sums[:, :, queries] = after
            if travelling is not None:
                both = travelling.wait()
        out = total.to(q.dtype)
        ctx.save_for_backward(q, own, out, sums)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of q, k and v. The gradients of keys and values travel around the
        ring together with the keys and values."""
        q, both, out, sums = ctx.saved_tensors
        rank, ranks = dist.get_rank(), dist.get_world_size()
        grad = grad.contiguous()
        dq = torch.zeros(q.shape, dtype=torch.float32)
        gradients = torch.zeros(both.shape, dtype=torch.float32)
        for step in range(ranks):
            travelling = _Travelling(both) if step + 1 < ranks else None
            queries, keys, causal = _block(rank, (rank - step) % ranks, q.shape[2])
            part = attend_backward(
                grad[:, :, queries],
                q[:, :, queries],
                both[0, :, :, keys],
                both[1, :, :, keys],
                out[:, :, queries],
                sums[:, :, queries],
                0.0,
                causal,
            )
            dq[:, :, queries] += part[0]
            gradients[:, :, :, keys] += torch.stack(part[1:])
            # after the last step, the gradients have arrived at the rank of their keys and values
            gradients = _Travelling(gradients).wait()
            if travelling is not None:
                both = travelling.wait()
        dk, dv = gradients.to(q.dtype)
        return dq.to(q.dtype), dk, dv
