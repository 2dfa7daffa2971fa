"""Cross-entropy of logits whose columns are divided over the tensor axis. The ranks send each other
only three numbers per token instead of the logits: the greatest logit, the sum of exponentials, and
the logit of the label (Shoeybi et al. 2019, arXiv 1909.08053, section 3). In the shapes below, V is
the size of the vocabulary and t is the number of tensor ranks.

By default torch's operations compute the loss. On a device, two kernels in Triton can compute it
instead (`ptdmpi.model.kernels.fused.loss`), if the kernels of the run include them.

The logits are usually the largest activation of a microbatch, so there is never a second copy of
them in memory. Logits of 16-bit types are converted to float32 for a few positions at a time, in
the forward pass and again in the backward pass.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from ptdmpi.model.kernels import USUAL, Kernels
from ptdmpi.model.tensor_parallel import TensorAxis
from ptdmpi.plan.layer.chunks import DEVICE_ELEMENTS, loss_rows


def token_log_probabilities(
    logits: Tensor, labels: Tensor, axis: TensorAxis
) -> tuple[Tensor, Tensor]:
    """Return two tensors [s, b]. The first is log softmax(logits)[label] of each token, in float32
    or wider. The second is a mask that is True if the label is the most probable entry of the
    vocabulary, or one of several equally probable ones. `logits` [s, b, V/t] are this rank's
    columns; the function does not overwrite them."""
    flat = logits.reshape(-1, logits.shape[-1])
    local, here = columns_of(labels, flat.shape[-1], axis)
    top, target = _greatest(flat, local, here, axis)
    sums = torch.empty_like(top)
    for rows in row_chunks(flat):
        torch.sum((widened(flat[rows]) - top[rows, None]).exp_(), -1, out=sums[rows])
    totals = axis.comm.all_reduce(torch.stack((sums, target)))
    logs = totals[1] - top - totals[0].log()
    greatest = totals[1] >= top
    return logs.view(labels.shape), greatest.view(labels.shape)


def columns_of(labels: Tensor, columns: int, axis: TensorAxis) -> tuple[Tensor, Tensor]:
    """Return two tensors for the labels [s, b], which are ids of the full vocabulary. The first
    tensor [s b, 1] has the index of each label among this rank's `columns` columns of the logits.
    The second tensor [s b] is a mask that is True if this rank has the label's column."""
    local = labels.reshape(-1) - axis.rank * columns
    here = (local >= 0) & (local < columns)
    return local.clamp(0, columns - 1)[:, None], here


def row_chunks(flat: Tensor, kernels: Kernels = USUAL) -> Iterator[slice]:
    """Yield slices of the rows of `flat` [s b, V/t]. The callers convert one slice at a time to a
    wider type. On a CPU, the choice of `kernels` determines the size of a slice."""
    logits = DEVICE_ELEMENTS
    if flat.device.type == "cpu":
        logits = kernels.chosen("cpu", flat.dtype).loss
    step = loss_rows(flat.shape[-1], logits)
    for first in range(0, len(flat), step):
        yield slice(first, first + step)


def _widens(flat: Tensor) -> bool:
    return flat.dtype in (torch.bfloat16, torch.float16)


def widened(chunk: Tensor) -> Tensor:
    """Return a chunk in float32 or a wider type. The result is the chunk itself if its type is
    float32 or wider, and a float32 copy otherwise."""
    if _widens(chunk):
        return chunk.float()
    return chunk


def _greatest(flat: Tensor, local: Tensor, here: Tensor, axis: TensorAxis) -> tuple[Tensor, Tensor]:
    """Return two values for each row of `flat` [s b, V/t]. The first is the greatest logit over all
    ranks' columns. The second is the label's logit if this rank has the label's column, and 0
    otherwise. For each row, `local` [s b, 1] is the index of the label's column among this rank's
    columns, and `here` [s b] is True if this rank has that column. If this rank does not have that
    column, `local` is an arbitrary valid index, and the logit at this index is not used. The
    callers subtract the greatest logit so that exponentials do not overflow; the subtraction does
    not change the loss.
    """
    # the maximum of 16-bit logits is exact, so only the maximum is converted to float32
    top = widened(flat.amax(-1))
    target = widened(flat.gather(-1, local)[:, 0])
    return axis.comm.all_reduce(top, "max"), target.masked_fill_(~here, 0.0)


class Softmax(NamedTuple):
    """The tensors that the backward pass of `softmax_losses` needs. `flat` [s b, V/t] is the buffer
    of the logits. `local` [s b, 1] is the index of each label's column among this rank's columns,
    and `here` [s b] is True if this rank has that column. `top` [s b] is the greatest logit of each
    row, and `totals` [s b] is the sum of the exponentials; both are over the columns of all ranks.
    """

    flat: Tensor
    local: Tensor
    here: Tensor
    top: Tensor
    totals: Tensor


def softmax_losses(
    logits: Tensor, labels: Tensor, axis: TensorAxis, kernels: Kernels = USUAL
) -> tuple[Tensor, Softmax]:
    """Return -log softmax(logits)[label] of each token [s b], and the tensors for the backward pass
    (`logit_gradient`). The function overwrites the logits. For the arguments see `cross_entropy`.
    """
    # detach the logits, because autograd does not allow writing to a view of a tensor with a graph
    flat = logits.detach().contiguous().view(-1, logits.shape[-1])
    local, here = columns_of(labels, flat.shape[-1], axis)
    top, target = _greatest(flat, local, here, axis)
    sums = torch.empty_like(top)
    for rows in row_chunks(flat, kernels):
        torch.sum(_exponentials(flat[rows], top[rows]), -1, out=sums[rows])
    # send the sums and the labels' logits in one message, because latency dominates the time for a
    # few bytes per token
    totals = axis.comm.all_reduce(torch.stack((sums, target)))
    losses = totals[0].log() + top - totals[1]
    return losses, Softmax(flat=flat, local=local, here=here, top=top, totals=totals[0])


def logit_gradient(
    softmax: Softmax, factors: Tensor, columns: Tensor, values: Tensor, *, kernels: Kernels = USUAL
) -> Tensor:
    """Overwrite the buffer of the logits [s b, V/t] with a gradient, and return the buffer. In each
    of the s b rows, the gradient is the softmax times the row's number in `factors` [s b], plus n
    additional values: `values` [s b, n] are added to the elements in this rank's `columns` [s b,
    n]. A row may have several values for the same column."""
    flat, _, _, top, totals = softmax
    for rows in row_chunks(flat, kernels):
        chunk = flat[rows]
        # for wide types, the forward pass has stored the exponentials in the buffer
        wide = _exponentials(chunk, top[rows]) if _widens(flat) else chunk
        wide.div_(totals[rows, None]).mul_(factors[rows, None])
        wide.scatter_add_(-1, columns[rows], values[rows])
        if wide is not chunk:
            chunk.copy_(wide)
        del wide  # free the float32 copy before the next chunk is converted
    return flat


class _Way(NamedTuple):
    """The settings for the computation of the cross-entropy: the tensor axis, the kernels of the
    run, and whether kernels in Triton compute the loss (`fused`)."""

    axis: TensorAxis
    kernels: Kernels = USUAL
    fused: bool = False

    def forward(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return the loss of each token [s b], and the tensors for the backward pass."""
        if self.fused:
            from ptdmpi.model.output import triton_loss

            return triton_loss.forward(logits, labels, self.axis)
        return softmax_losses(logits, labels, self.axis, self.kernels)

    def backward(self, saved: Sequence[Tensor], factors: Tensor) -> Tensor:
        """Overwrite the buffer of the logits [s b, V/t] with their gradient, and return it. `saved`
        are the tensors that `forward` returned, and `factors` [s b] are the gradients of the
        tokens' losses."""
        if self.fused:
            from ptdmpi.model.output import triton_loss

            return triton_loss.backward(triton_loss.FusedSoftmax(*saved), factors, self.axis)
        softmax = Softmax(*saved)
        # subtract each token's factor from the gradient of its label's logit, on the rank that has
        # the label's column; other ranks subtract 0
        labels = -(factors * softmax.here)[:, None]
        return logit_gradient(softmax, factors, softmax.local, labels, kernels=self.kernels)


class _CrossEntropy(Function):
    """The weighted sum of the tokens' cross-entropies, computed without gathering the logits: three
    numbers per token are sent over the tensor axis.

    The same buffer contains first the logits and later their gradient. If the logits are float32 or
    wider, the buffer contains the exponentials between the forward and the backward pass, so no
    copy is needed.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, weights: Tensor | None, way: _Way
    ) -> Tensor:
        losses, softmax = way.forward(logits, labels)
        if weights is not None:
            weights = weights.reshape(-1).to(losses.dtype)
            losses = losses * weights
        ctx.save_for_backward(weights, *softmax)
        ctx.shape, ctx.way = logits.shape, way
        return losses.sum()

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor, None, None, None]:
        weights, *saved = ctx.saved_tensors
        factors = scale.expand(ctx.shape[:-1].numel())
        if weights is not None:
            factors = scale * weights
        return ctx.way.backward(saved, factors).view(ctx.shape), None, None, None


class _TokenLosses(Function):
    """The cross-entropy of each token separately, for a loss that is not a weighted sum over
    tokens."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, way: _Way) -> Tensor:
        losses, softmax = way.forward(logits, labels)
        ctx.save_for_backward(*softmax)
        ctx.shape, ctx.way = logits.shape, way
        return losses.view(labels.shape)

    @staticmethod
    def backward(ctx: Any, scales: Tensor) -> tuple[Tensor, None, None]:
        gradient = ctx.way.backward(ctx.saved_tensors, scales.reshape(-1))
        return gradient.view(ctx.shape), None, None


def _exponentials(chunk: Tensor, top: Tensor) -> Tensor:
    """Return exp(chunk - top). If the type of the chunk is float32 or wider, the result overwrites
    the chunk."""
    return widened(chunk).sub_(top[:, None]).exp_()


def cross_entropy(
    logits: Tensor,
    labels: Tensor,
    weights: Tensor | None,
    axis: TensorAxis,
    *,
    kernels: Kernels = USUAL,
) -> Tensor:
    """Return the sum over tokens of weight * -log softmax(logits)[label], in nats, in float32 or
    wider.

    The function overwrites the logits, so its backward pass can run only once. `logits` [s, b, V/t]
    are this rank's columns, and `labels` [s, b] are ids of the full vocabulary. `weights` are [s,
    b]; None means a weight of 1 for each token. `kernels` are the kernels of the run. The method is
    that of Shoeybi et al. 2019, section 3.
    """
    way = _Way(axis, kernels, kernels.by_triton("loss"))
    return _CrossEntropy.apply(logits, labels, weights, way)


def token_losses(logits: Tensor, labels: Tensor, axis: TensorAxis) -> Tensor:
    """Return -log softmax(logits)[label] of each token [s, b], in nats, in float32 or wider. For
    the arguments see `cross_entropy`; the logits are overwritten."""
    return _TokenLosses.apply(logits, labels, _Way(axis))
