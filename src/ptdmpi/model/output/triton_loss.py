"""The cross-entropy of logits by Triton's kernels (`ptdmpi.model.kernels.fused.loss`). The
columns of the logits are divided over the tensor axis. This module imports Triton, so
`cross_entropy` imports it only if the kernels are used."""

from typing import NamedTuple

from torch import Tensor

from ptdmpi.model.kernels.fused import loss as fused
from ptdmpi.model.tensor_parallel import TensorAxis


class FusedSoftmax(NamedTuple):
    """The tensors that the backward pass by Triton's kernel needs. `labels` [s b] are columns of
    the full vocabulary; for the other fields see `Softmax` in `cross_entropy`."""

    flat: Tensor
    labels: Tensor
    top: Tensor
    totals: Tensor


def forward(logits: Tensor, labels: Tensor, axis: TensorAxis) -> tuple[Tensor, FusedSoftmax]:
    """Return the same results as `cross_entropy.softmax_losses`, computed by a kernel in Triton,
    which does not overwrite the logits."""
    flat = logits.detach().contiguous().view(-1, logits.shape[-1])
    labels = labels.reshape(-1)
    own_top, totals = fused.row_sums(flat, labels, axis.rank * flat.shape[-1])
    top = own_top
    if axis.size > 1:
        top = axis.comm.all_reduce(own_top.clone(), "max")
        # make the sum of exponentials relative to the greatest logit of all ranks; the sum becomes
        # 0 if all columns of this rank are padded (-inf)
        totals[0] *= (own_top - top).exp_()
        totals = axis.comm.all_reduce(totals)
    losses = totals[0].log() + top - totals[1]
    return losses, FusedSoftmax(flat=flat, labels=labels, top=top, totals=totals[0])


def backward(softmax: FusedSoftmax, factors: Tensor, axis: TensorAxis) -> Tensor:
    """Overwrite the buffer of the logits with their gradient by Triton's kernel, and return it.
    `factors` [s b] are the gradients of the tokens' losses."""
    flat, labels, top, totals = softmax
    first = axis.rank * flat.shape[-1]
    fused.write_gradient(flat, labels, first, row=(top, totals, factors))
    return flat
