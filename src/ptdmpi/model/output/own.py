"""The user's own loss, which replaces the cross-entropy if `run.loss` names it.

The user writes a function `loss(inputs) -> (sum, count)`, which returns the sum of the loss's terms
and their number, for one microbatch on one rank. The trainer adds sums and counts over all
microbatches and ranks, and minimizes sum / count, so the mean is exact in every layout.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional

from ptdmpi.base.errors import InputError
from ptdmpi.base.plugins import plugin, users_code
from ptdmpi.comm.communicator import Communicator
from ptdmpi.config import Config
from ptdmpi.model.batch import Microbatch
from ptdmpi.model.output.losses import COUNT, TASK
from ptdmpi.model.sequence.context import ContextAxis
from ptdmpi.model.tensor_parallel import TensorAxis

# The smallest and the largest count of a microbatch, apart from 0. The mean is computed in float32,
# whose normal numbers are from 1.2e-38 to 3.4e38. The sum of the counts of 10^8 microbatches, and 1
# / sum, are such numbers.
LEAST_COUNT, MOST_COUNT = 1e-30, 1e30


@dataclass(frozen=True)
class LossInput:
    """The inputs of the user's own loss: the logits and the data of one microbatch on one rank.

    `logits` [s, b, V/t] are the logits at this rank's positions, for the columns of the vocabulary
    from `first_column` on; V is `vocab_size`, and t is the number of tensor ranks. If t does not
    divide V, the last ranks have fewer columns. All ranks of the tensor axis compute the loss
    together, each rank from its own columns. `batch` has the `labels` [s, b], the `weights` of the
    labels [s, b] (None means 1 for each label), the `inputs` and the numbers of the `samples` [b].
    In a masked language model only the k masked positions have logits, labels and weights.
    """

    logits: Tensor
    batch: Microbatch
    first_column: int
    vocab_size: int
    tensor: TensorAxis
    context: ContextAxis

    def log_softmax(self) -> Tensor:
        """Return log softmax(logits) at this rank's columns [s, b, V/t], in float32 or wider. The
        softmax is over the full vocabulary."""
        wide = self.logits.to(torch.promote_types(self.logits.dtype, torch.float32))
        top = self.tensor.comm.all_reduce(wide.detach().amax(-1), "max")
        shifted = wide - top[..., None]
        return shifted - self.sum_over_vocabulary(shifted.exp().sum(-1)).log()[..., None]

    def log_probabilities(
        self, log_softmax: Tensor | None = None, ids: Tensor | None = None
    ) -> Tensor:
        """Return the log-probability of each id in `ids`, in the shape of `ids`: [s, b], or
        [s, b, k] for k ids at each position. None means the labels. All tensor ranks must give the
        same ids. `log_softmax` may be the result of the method `log_softmax`; None means that this
        method computes it."""
        logs = self.log_softmax() if log_softmax is None else log_softmax
        asked = self.batch.labels if ids is None else ids
        columns = asked.reshape(*logs.shape[:-1], -1) - self.first_column  # [s, b, k]
        here = (columns >= 0) & (columns < logs.shape[-1])
        own = logs.gather(-1, columns.clamp(0, logs.shape[-1] - 1))
        return self.sum_over_vocabulary(own * here).view(asked.shape)

    def gather(self, columns: Tensor) -> Tensor:
        """Return the values at all columns of the vocabulary [..., V]. `columns` [..., V/t] has the
        values at this rank's columns, such as the logits or the result of `log_softmax`. The result
        is equal on all tensor ranks, and each of them stores all V values."""
        own = columns[..., : max(0, self.vocab_size - self.first_column)]
        before = min(self.first_column, self.vocab_size)
        after = self.vocab_size - before - own.shape[-1]
        return self.sum_over_vocabulary(functional.pad(own, (before, after)))

    def sum_over_vocabulary(self, values: Tensor) -> Tensor:
        """Return the sum of `values` over the tensor axis. `values` may have any shape, and must be
        sums over this rank's columns. The result is equal on all tensor ranks."""
        return sum_over(values, self.tensor.comm)

    def sum_over_sequence(self, values: Tensor) -> Tensor:
        """Return the sums [b] of `values` [s, b] over all positions of each sequence. The result is
        equal on all ranks of the context axis."""
        return sum_over(values.sum(0), self.context.comm)

    def of_tokens(self, losses: Tensor) -> tuple[Tensor, float]:
        """Return (sum, count) for the labels' losses [s, b], each multiplied by the weight of its
        label. Raise InputError if `losses` is not a tensor in the shape of the labels."""
        _require_shape("of_tokens", losses, self.batch.labels.shape)
        if self.batch.weights is not None:
            losses = losses * self.batch.weights
        return losses.sum(), self.batch.tokens

    def of_sequences(self, losses: Tensor) -> tuple[Tensor, float]:
        """Return (sum, count) for the losses [b] of the sequences. All c ranks of the context axis
        have computed the same losses, and the trainer adds the results of all ranks, so each rank
        returns 1/c of the sum and of the count. Raise InputError if `losses` is not a tensor of the
        shape [b]."""
        _require_shape("of_sequences", losses, self.batch.labels.shape[1:])
        return losses.sum() / self.context.size, len(losses) / self.context.size


def _require_shape(method: str, losses: object, shape: torch.Size) -> None:
    """Raise InputError if `losses`, the argument of a method of `LossInput`, is not a tensor of
    this shape: the method would divide the sum by another number of terms."""
    if not isinstance(losses, Tensor):
        given = f"losses of the type {type(losses).__name__}"
    elif losses.shape != shape:
        given = f"losses of shape {list(losses.shape)}"
    else:
        return
    raise InputError(f"inputs.{method} got {given}; legal: a tensor of shape {list(shape)}")


def sum_over(values: Tensor, comm: Communicator) -> Tensor:
    """Return the sum of `values` over the ranks of `comm`. The losses of all ranks depend on this
    sum, so in the backward, the gradients of all ranks with respect to the sum are added."""
    return _Sum.apply(values, comm)


class _Sum(Function):
    """The autograd Function of `sum_over`: an all-reduce of the values in the forward, and an
    all-reduce of the gradients in the backward."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, comm: Communicator) -> Tensor:
        ctx.comm = comm
        return comm.all_reduce(values.clone(memory_format=torch.contiguous_format))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return ctx.comm.all_reduce(dy.clone(memory_format=torch.contiguous_format)), None


class _CountedOnce(Function):
    """The identity function, applied to a loss that all ranks of an axis have computed together.
    The backward divides the gradient by the number of ranks, because `_Sum` adds the gradients of
    all ranks' losses."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, ranks: int) -> Tensor:
        ctx.ranks = ranks
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return dy / ctx.ranks, None


@dataclass(frozen=True)
class OwnLoss:
    """The user's own loss, which `run.loss` names, and the tensor and context axes on which the
    ranks compute it together."""

    name: str
    vocab_size: int
    function: Callable[[LossInput], tuple[Tensor, Tensor | float]]
    tensor: TensorAxis
    context: ContextAxis

    @classmethod
    def of(
        cls, config: Config, vocab_size: int, tensor: TensorAxis, context: ContextAxis
    ) -> "OwnLoss":
        """Return the loss that `run.loss` names. Raise InputError for a name that cannot be
        imported."""
        return cls(
            name=config.run.loss,
            vocab_size=vocab_size,
            function=plugin("losses", config.run.loss),
            tensor=tensor,
            context=context,
        )

    def __call__(self, logits: Tensor, batch: Microbatch) -> dict[str, Tensor]:
        """Return a dict with two scalar tensors: the sum of the loss's terms in a microbatch (key
        TASK), and their number (key COUNT). `logits` [s, b, ceil(V/t)] may have padded columns.
        Raise InputError if the user's function ends the program, or if it does not return a sum and
        a count on the device of the logits. Also raise InputError if the logits need a gradient,
        but the sum has none."""
        share = logits.shape[-1]
        first = self.tensor.rank * share
        own = logits[..., : max(1, self.vocab_size - first)]  # leave out the padded columns
        inputs = LossInput(
            logits=own,
            batch=batch,
            first_column=first,
            vocab_size=self.vocab_size,
            tensor=self.tensor,
            context=self.context,
        )
        with users_code(self.name):
            result = self.function(inputs)
        total, count = self._checked(result, logits.device)
        if logits.requires_grad and not total.requires_grad:
            raise InputError(f"{self.name} returned a sum that has no gradient")
        total = _CountedOnce.apply(total, self.tensor.size)
        return {TASK: total, COUNT: count.to(torch.promote_types(total.dtype, torch.float32))}

    def _checked(self, result: Any, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the user's `result`: the sum, a scalar tensor, and the count, a scalar tensor in
        float64. Raise InputError if it is anything else."""
        if not (isinstance(result, tuple) and len(result) == 2):
            raise InputError(f"{self.name} returned {type(result).__name__}, not (sum, count)")
        total, count = result
        if not (isinstance(total, Tensor) and isinstance(count, Tensor | Real)):
            kinds = f"({type(total).__name__}, {type(count).__name__})"
            raise InputError(f"{self.name} returned {kinds}; legal: a tensor and a number")
        if total.dim() or not total.is_floating_point():
            shape = f"{str(total.dtype).removeprefix('torch.')} of shape {list(total.shape)}"
            raise InputError(f"{self.name} returned a sum of {shape}, not one floating-point sum")
        if total.device != device:
            raise InputError(f"{self.name} returned a sum on {total.device}; legal: on {device}")
        if isinstance(count, Tensor):
            if count.numel() != 1 or count.is_meta or count.is_complex():
                shape = f"{list(count.shape)} on {count.device}"
                raise InputError(f"{self.name} returned a count of shape {shape}, not one number")
            count = count.detach().reshape(()).to(device, torch.float64)
            if device.type != "cpu":  # a check would wait for the device
                return total, count
        try:
            number = float(count)
        except OverflowError:  # an integer that float64 cannot hold
            number = math.inf
        if number != 0 and not LEAST_COUNT <= number <= MOST_COUNT:
            legal = f"0, or {LEAST_COUNT} to {MOST_COUNT}"
            raise InputError(f"{self.name} returned the count {number}; legal: {legal}")
        return total, torch.tensor(number, dtype=torch.float64, device=device)
