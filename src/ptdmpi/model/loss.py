"""Cross-entropy of logits whose columns are divided over the tensor axis: three numbers per token
cross it, the logits never do (Shoeybi et al. 2019, arXiv 1909.08053, section 3)."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from ptdmpi.model.tensor_parallel import TensorAxis


def token_log_probabilities(
    logits: Tensor, labels: Tensor, axis: TensorAxis
) -> tuple[Tensor, Tensor]:
    """log softmax(logits)[label] of each token [s, b], in float32 at least, and whether no other
    label is more probable. Logits as in `cross_entropy`, and not overwritten."""
    wide = logits if logits.dtype == torch.float64 else logits.float()
    columns = wide.shape[-1]
    local = labels - axis.rank * columns
    here = (local >= 0) & (local < columns)
    top = axis.comm.all_reduce(wide.amax(-1), "max")
    target = wide.gather(-1, local.clamp(0, columns - 1)[..., None]).squeeze(-1)
    target = target.masked_fill(~here, 0.0)
    exponentials = (wide - top[..., None]).exp_().sum(-1)
    totals = axis.comm.all_reduce(torch.stack((exponentials, target)))
    return totals[1] - top - totals[0].log(), totals[1] >= top


class _CrossEntropy(Function):
    """Never gathers the logits: three numbers per token cross the tensor axis.

    One buffer holds logits, then probabilities, then their gradient.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, weights: Tensor | None, axis: TensorAxis
    ) -> Tensor:
        wide = logits if logits.dtype == torch.float64 else logits.float()
        columns = wide.shape[-1]
        local = labels - axis.rank * columns
        here = (local >= 0) & (local < columns)
        local = local.clamp(0, columns - 1)[..., None]
        # of all ranks' columns: no exponential overflows, and in the loss it cancels
        top = axis.comm.all_reduce(wide.amax(-1), "max")
        target = wide.gather(-1, local).squeeze(-1).masked_fill_(~here, 0.0)
        # In place: no backward pass wants the logits, and they are the largest tensor of a step.
        exponentials = wide.sub_(top[..., None]).exp_()
        # one message for both: of a few bytes per token it is the latency that costs
        totals = axis.comm.all_reduce(torch.stack((exponentials.sum(-1), target)))
        losses = totals[0].log() + top - totals[1]
        weights = None if weights is None else weights.to(losses.dtype)
        probabilities = exponentials.div_(totals[0][..., None])
        ctx.save_for_backward(probabilities, local, here, weights)
        ctx.dtype = logits.dtype
        return (losses if weights is None else losses * weights).sum()

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor, None, None, None]:
        probabilities, local, here, weights = ctx.saved_tensors
        factors = scale.expand(here.shape) if weights is None else scale * weights
        gradient = probabilities.mul_(factors[..., None])
        # softmax - 1 at the label, on the rank that has its column; elsewhere the label adds 0
        gradient.scatter_add_(-1, local, -(factors * here)[..., None])
        return gradient.to(ctx.dtype), None, None, None


def cross_entropy(
    logits: Tensor, labels: Tensor, weights: Tensor | None, axis: TensorAxis
) -> Tensor:
    """Sum over tokens of weight * -log softmax(logits)[label], in nats, float32 at least.

    Overwrites the logits, and its backward pass can run only once.
    logits [s, b, V/t] are this rank's columns, labels [s, b] are ids of the whole vocabulary,
    weights [s, b] (None: 1 each). Shoeybi et al. 2019, section 3.
    """
    return _CrossEntropy.apply(logits, labels, weights, axis)
