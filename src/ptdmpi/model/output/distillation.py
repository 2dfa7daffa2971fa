"""The loss of distillation: a student model learns the probabilities that a teacher model gives to
its K most probable tokens (Hinton et al. 2015, arXiv 1503.02531, section 2, at temperature 1).

All other tokens count as one more outcome, whose probability in the teacher is 1 - sum q_k. For
each label, the loss is the Kullback-Leibler divergence of the K + 1 outcomes:

    sum_k q_k (log q_k - log p_k) + r (log r - log(1 - sum_k p_k)),    r = 1 - sum_k q_k

Here q_k is the stored probability of the teacher, and p_k the probability of the student. Merging
outcomes cannot increase the divergence, so this loss is at most the divergence over the full
vocabulary. Both are equal if K is the size of the vocabulary.

In the shapes below, V is the size of the vocabulary and t is the number of tensor ranks.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from ptdmpi.config import Config
from ptdmpi.config.sections import DistillationConfig
from ptdmpi.model.batch import Microbatch
from ptdmpi.model.output.cross_entropy import (
    Softmax,
    columns_of,
    cross_entropy,
    logit_gradient,
    row_chunks,
    softmax_losses,
    widened,
)
from ptdmpi.model.output.losses import DISTILLATION, TASK
from ptdmpi.model.sequence.context import ContextAxis
from ptdmpi.model.tensor_parallel import TensorAxis


def top_log_probabilities(logits: Tensor, count: int, axis: TensorAxis) -> tuple[Tensor, Tensor]:
    """Return the ids of the `count` most probable tokens at each position, int64 [s, b, count], and
    their log-probabilities in nats, in float32 or wider. The tokens are in order of decreasing
    probability. `logits` [s, b, V/t] are this rank's columns; padded columns have the logit -inf.
    `count` is at most V."""
    flat = logits.reshape(-1, logits.shape[-1])
    width = flat.shape[-1]
    own = min(count, width)
    top = axis.comm.all_reduce(widened(flat.amax(-1)), "max")
    sums = torch.empty_like(top)
    values = top.new_empty(len(flat), own)
    ids = torch.empty(len(flat), own, dtype=torch.int64, device=flat.device)
    for rows in row_chunks(flat):
        wide = widened(flat[rows])
        torch.topk(wide, own, out=(values[rows], ids[rows]))
        torch.sum((wide - top[rows, None]).exp_(), -1, out=sums[rows])
    ids += axis.rank * width
    # [t * own, s * b], because each of the t tensor ranks contributes its `own` most probable
    # tokens at each position
    gathered = axis.comm.all_gather(values.t().contiguous())
    all_ids = axis.comm.all_gather(ids.t().contiguous())
    best, places = torch.topk(gathered, count, dim=0)
    logs = best - top - axis.comm.all_reduce(sums).log()
    shape = (*logits.shape[:-1], count)
    return all_ids.gather(0, places).t().reshape(shape), logs.t().reshape(shape)


class _Teacher(NamedTuple):
    """The teacher's probabilities for n = s b positions, on one tensor rank. `local` [n, K] is the
    index of each of the K tokens among this rank's columns, and `here` [n, K] is True where this
    rank has the token's column. `q` [n, K] has the probabilities of the K tokens, and `rest` [n] is
    the probability of all other tokens."""

    local: Tensor
    here: Tensor
    q: Tensor
    rest: Tensor


def _teacher(batch: Microbatch, columns: int, dtype: torch.dtype, axis: TensorAxis) -> _Teacher:
    """Return the teacher's probabilities for the positions of `batch`, in the type `dtype`. This
    tensor rank has `columns` columns of the logits."""
    assert batch.teacher is not None, "the batch must have the outputs of the teacher"
    kept = batch.teacher.ids.shape[-1]
    local, here = columns_of(batch.teacher.ids, columns, axis)
    q = batch.teacher.logs.reshape(-1, kept).to(dtype).exp()
    return _Teacher(local.view(-1, kept), here.view(-1, kept), q, (1 - q.sum(-1)).clamp_min(0))


class _Distillation(Function):
    """Two losses of the same logits: the weighted sums over tokens of the cross-entropy and of the
    divergence from the teacher. Both losses use the same softmax. The sum of both gradients
    overwrites the buffer of the logits.

    For a token j, let p_j be the student's probability, and q_j the teacher's stored probability.
    Let S be the sum of p_k over the stored tokens k, and let r be the teacher's probability of all
    tokens that are not stored. For the logit of a stored token j, the gradient of the divergence is
    p_j - q_j. For every other logit, it is p_j (1 - r / (1 - S)).
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, batch: Microbatch, axis: TensorAxis
    ) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(logits.dtype, torch.float32)
        teacher = _teacher(batch, logits.shape[-1], wide, axis)
        # the logits of the stored tokens are read before the softmax overwrites the buffer
        scores = logits.detach().reshape(-1, logits.shape[-1]).gather(-1, teacher.local).to(wide)
        losses, softmax = softmax_losses(logits, batch.labels, axis)
        shifted = scores - softmax.top[:, None]
        exps = shifted.exp().masked_fill_(~teacher.here, 0)
        # If another rank has the column of a stored token, replace the product by 0. The product
        # was computed from the logit of another column, and may be -inf or NaN, because padded
        # columns have the logit -inf.
        products = (teacher.q * shifted).masked_fill_(~teacher.here, 0)
        sums = axis.comm.all_reduce(torch.stack((exps.sum(-1), products.sum(-1))))
        # limit the probability of the other tokens from below, because its logarithm would be -inf
        # if rounding made it 0
        others = (1 - sums[0] / softmax.totals).clamp_min_(torch.finfo(wide).eps)
        entropy = torch.xlogy(teacher.q, teacher.q).sum(-1)
        matched = sums[1] - teacher.q.sum(-1) * softmax.totals.log()
        rest = torch.xlogy(teacher.rest, teacher.rest) - teacher.rest * others.log()
        divergences = entropy - matched + rest
        weights = None
        if batch.weights is not None:
            weights = batch.weights.reshape(-1).to(wide)
            losses = losses * weights
            divergences = divergences * weights
        ratio = teacher.rest / others
        probabilities = exps / softmax.totals[:, None]
        q = teacher.q * teacher.here
        ctx.save_for_backward(weights, teacher.local, ratio, probabilities, q, *softmax)
        ctx.shape = logits.shape
        return losses.sum(), divergences.sum()

    @staticmethod
    def backward(ctx: Any, scale: Tensor, teacher_scale: Tensor) -> tuple[Tensor, None, None]:
        weights, local, ratio, probabilities, q, *saved = ctx.saved_tensors
        softmax = Softmax(*saved)
        factors = scale.expand(ratio.shape)
        of_teacher = teacher_scale.expand(ratio.shape)
        if weights is not None:
            factors = scale * weights
            of_teacher = teacher_scale * weights
        stored = of_teacher[:, None] * (ratio[:, None] * probabilities - q)
        columns = torch.cat((softmax.local, local), -1)
        values = torch.cat((-(factors * softmax.here)[:, None], stored), -1)
        everywhere = factors + of_teacher * (1 - ratio)
        gradient = logit_gradient(softmax, everywhere, columns, values)
        return gradient.view(ctx.shape), None, None


@dataclass(frozen=True)
class DistillationLoss:
    """The loss of a run that distills a teacher (section [distillation] of the configuration). All
    ranks of the tensor axis `axis` compute it together."""

    config: DistillationConfig
    axis: TensorAxis

    @classmethod
    def of(
        cls, config: Config, vocab_size: int, tensor: TensorAxis, context: ContextAxis
    ) -> "DistillationLoss":
        """Return the loss of a run with the section [distillation]."""
        return cls(config.distillation, tensor)

    def __call__(self, logits: Tensor, batch: Microbatch) -> dict[str, Tensor]:
        """Return two sums over the tokens of a microbatch, computed from this tensor rank's columns
        of the logits [s, b, V/t]: the cross-entropy, and the divergence from the teacher times
        `distillation.weight`. The logits are overwritten. The divergence is 0 for a microbatch
        without outputs of a teacher, as in validation."""
        if batch.teacher is None:
            loss = cross_entropy(logits, batch.labels, batch.weights, self.axis)
            return {TASK: loss, DISTILLATION: torch.zeros_like(loss)}
        loss, divergence = _Distillation.apply(logits, batch, self.axis)
        return {TASK: loss, DISTILLATION: self.config.weight * divergence}
