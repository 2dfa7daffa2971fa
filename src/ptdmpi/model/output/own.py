"""A loss of the user's own in place of the cross-entropy.

The user writes a function `loss(inputs) -> (sum, count)`, which returns the sum and the number of
its terms for one microbatch on one rank. The trainer adds both over all microbatches and ranks and
minimizes sum / count, so the mean is exact in every layout.
"""

from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from ptdmpi.base.errors import InputError
from ptdmpi.base.plugins import plugin
from ptdmpi.comm.communicator import Communicator
from ptdmpi.model.batch import Microbatch
from ptdmpi.model.output.losses import COUNT, TASK
from ptdmpi.model.sequence.context import ContextAxis
from ptdmpi.model.tensor_parallel import TensorAxis


@dataclass(frozen=True)
class LossInput:
    """The inputs of a loss: the logits and the batch of one microbatch on one rank.

    `logits` [s, b, V/t] are the logits at this rank's positions, for the columns of the vocabulary
    from `first_column` on. If t does not divide V = `vocab_size`, the last ranks have fewer
    columns. All ranks of the tensor axis compute the loss together, each from its own columns.
    `batch` has the `labels` [s, b], their `weights` [s, b] (None: 1 each), the `inputs` and the
    numbers of the `samples` [b]. In a masked language model only the k masked positions have
    logits, labels and weights.
    """

    logits: Tensor
    batch: Microbatch
    first_column: int
    vocab_size: int
    tensor: TensorAxis
    context: ContextAxis

    def log_softmax(self) -> Tensor:
        """Return log softmax(logits) over the full vocabulary, at this rank's columns [s, b, V/t],
        in float32 or wider."""
        wide = self.logits.to(torch.promote_types(self.logits.dtype, torch.float32))
        top = self.tensor.comm.all_reduce(wide.detach().amax(-1), "max")
        shifted = wide - top[..., None]
        return shifted - self.sum_over_vocabulary(shifted.exp().sum(-1)).log()[..., None]

    def log_probabilities(self, log_softmax: Tensor | None = None) -> Tensor:
        """Return the log-probability of each label [s, b], from `log_softmax` if it is given."""
        logs = self.log_softmax() if log_softmax is None else log_softmax
        columns = self.batch.labels - self.first_column
        here = (columns >= 0) & (columns < logs.shape[-1])
        own = logs.gather(-1, columns.clamp(0, logs.shape[-1] - 1)[..., None])[..., 0]
        return self.sum_over_vocabulary(own * here)

    def sum_over_vocabulary(self, values: Tensor) -> Tensor:
        """Return the sum of `values` over the tensor axis. `values`, of any shape, are sums over
        this rank's columns. The result is equal on all ranks of the axis."""
        return sum_over(values, self.tensor.comm)

    def sum_over_sequence(self, values: Tensor) -> Tensor:
        """Return the sums [b] of `values` [s, b] over all positions of each sequence, equal on all
        ranks of the context axis."""
        return sum_over(values.sum(0), self.context.comm)

    def of_tokens(self, losses: Tensor) -> tuple[Tensor, float]:
        """Return (sum, count) for the losses [s, b] of the labels, each multiplied by the label's
        weight."""
        if self.batch.weights is not None:
            losses = losses * self.batch.weights
        return losses.sum(), self.batch.tokens

    def of_sequences(self, losses: Tensor) -> tuple[Tensor, float]:
        """Return (sum, count) for the losses [b] of the sequences. All ranks of the context axis
        have computed the same losses, so each rank returns its share of sum and count."""
        return losses.sum() / self.context.size, len(losses) / self.context.size


def sum_over(values: Tensor, comm: Communicator) -> Tensor:
    """Return the sum of `values` over the ranks of an axis. The losses of all these ranks use the
    sum."""
    return _Sum.apply(values, comm)


class _Sum(Function):
    """A sum over an axis. The losses of all ranks depend on the sum, so its gradient is summed over
    the ranks, too."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, comm: Communicator) -> Tensor:
        ctx.comm = comm
        return comm.all_reduce(values.clone(memory_format=torch.contiguous_format))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return ctx.comm.all_reduce(dy.clone(memory_format=torch.contiguous_format)), None


class _CountedOnce(Function):
    """A loss that all ranks of an axis have computed together. Each rank uses 1 / ranks of the
    gradient, because `_Sum` adds the gradients of all ranks' losses."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, ranks: int) -> Tensor:
        ctx.ranks = ranks
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return dy / ctx.ranks, None


@dataclass(frozen=True)
class OwnLoss:
    """The loss that `run.loss` names, and the axes over which it is computed."""

    name: str
    vocab_size: int
    function: Callable[[LossInput], tuple[Tensor, Tensor | float]]
    tensor: TensorAxis
    context: ContextAxis

    @classmethod
    def of(
        cls, name: str, vocab_size: int, tensor: TensorAxis, context: ContextAxis
    ) -> "OwnLoss | None":
        """Return the loss of this name. Return None if the name is "", which means the
        cross-entropy. Raise InputError for a name that cannot be imported."""
        if not name:
            return None
        return cls(
            name=name,
            vocab_size=vocab_size,
            function=plugin("losses", name),
            tensor=tensor,
            context=context,
        )

    def __call__(self, logits: Tensor, batch: Microbatch) -> dict[str, Tensor]:
        """Return the sum and the count of a microbatch, as tensors without dims, from the logits
        [s, b, ceil(V/t)] with padded columns. Raise InputError if the user's function does not
        return a sum and a count, or if the sum does not depend on logits that have gradients."""
        share = logits.shape[-1]
        first = self.tensor.rank * share
        own = logits[..., : max(1, self.vocab_size - first)]  # padded columns are -inf
        inputs = LossInput(
            logits=own,
            batch=batch,
            first_column=first,
            vocab_size=self.vocab_size,
            tensor=self.tensor,
            context=self.context,
        )
        result = self.function(inputs)
        if not (isinstance(result, tuple) and len(result) == 2):
            raise InputError(f"{self.name} returned {type(result).__name__}, not (sum, count)")
        total, count = result
        if not (isinstance(total, Tensor) and isinstance(count, Tensor | Real)):
            kinds = f"({type(total).__name__}, {type(count).__name__})"
            raise InputError(f"{self.name} returned {kinds}; legal: a tensor and a number")
        if total.dim():
            shape = list(total.shape)
            raise InputError(f"{self.name} returned a sum of shape {shape}, not one sum")
        if logits.requires_grad and not total.requires_grad:
            raise InputError(f"{self.name} returned a sum that has no gradient")
        total = _CountedOnce.apply(total, self.tensor.size)
        count = torch.as_tensor(count, dtype=torch.float64, device=total.device).detach()
        return {TASK: total, COUNT: count.to(total.dtype)}
