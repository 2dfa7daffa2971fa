"""The outputs of a model: logits, scores and losses, computed from the activations of the last
layer.

An output consists of modules, which the last pipeline stage registers. It computes the losses, by
name, from the activations of the last layer. In the shapes below, V is the size of the vocabulary,
t is the number of tensor ranks, and h is the hidden size.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ptdmpi.base.plugins import built_in
from ptdmpi.config import Config, ModelConfig
from ptdmpi.model import built
from ptdmpi.model.batch import Microbatch
from ptdmpi.model.kernels.norm import Norm
from ptdmpi.model.operators import Context
from ptdmpi.model.output.cross_entropy import cross_entropy
from ptdmpi.model.output.losses import ORDER, RIGHT, TASK
from ptdmpi.model.output.positions import select_positions
from ptdmpi.model.sequence.ahead import TokensAhead
from ptdmpi.model.sequence.context import ContextAxis
from ptdmpi.model.tensor_parallel import TensorAxis
from ptdmpi.model.transformer import Classes, Layered, MaskedTransform, SentenceOrder
from ptdmpi.plan.layer.parts import Parts
from ptdmpi.plan.shape import parameters

# The losses that a run can use instead of the cross-entropy, and the output with modules for
# multi-token prediction, as "module:class". A class is imported only when a run uses it.
LOSSES = {
    "distillation": "ptdmpi.model.output.distillation:DistillationLoss",
    "own": "ptdmpi.model.output.own:OwnLoss",
    "preference": "ptdmpi.model.output.preference:PreferenceLoss",
}
AHEAD = "ptdmpi.model.output.ahead:AheadOutput"


class OutputLoss(Protocol):
    """A loss that a run uses instead of the cross-entropy."""

    def __call__(self, logits: Tensor, batch: Microbatch) -> dict[str, Tensor]:
        """Return the losses by name, each summed over the microbatch."""


class Output(ABC):
    """The base class of outputs. An output is the part of a model after the last layer. The
    pipeline stage registers `modules` under their names. `loss` computes the losses from the
    logits; None means that the loss is the cross-entropy. `extra` has the modules for multi-token
    prediction."""

    loss: OutputLoss | None = None
    extra: Sequence[Layered] = ()

    def __init__(self, model: ModelConfig, parts: Parts, axis: TensorAxis) -> None:
        self.axis = axis
        self.modules: dict[str, nn.Module] = {}
        self.final_norm: Norm | None = None
        if "final_norm" in parts:
            self.final_norm = Norm(model)
            self.modules["final_norm"] = self.final_norm

    def normalized(self, x: Tensor) -> Tensor:
        """Return the activations [s, b, h] after the final norm, if the model has one."""
        if self.final_norm is None:
            return x
        return self.final_norm(x)

    @abstractmethod
    def losses(self, batch: Microbatch, x: Tensor, context: Context) -> dict[str, Tensor]:
        """Return the losses by name, each summed over the microbatch, from the normalized
        activations `x`. The task's loss is the first one."""

    def logits_ahead(self, ahead: TokensAhead, x: Tensor, context: Context) -> tuple[Tensor, ...]:
        """Return the logits [s, b, V/t] of each module for multi-token prediction for which `ahead`
        has tokens, from the normalized activations `x`. Only `AheadOutput` has such modules."""
        raise NotImplementedError("a model without modules predicts no further")


class TokenOutput(Output):
    """The output of a model that predicts tokens. The logits at each position predict the next
    token."""

    def __init__(self, model: ModelConfig, parts: Parts, axis: TensorAxis) -> None:
        super().__init__(model, parts, axis)
        self._add_transform(model, parts)
        # muP multiplies the logits by a factor; multiplying the head's input gives the same result
        # with less work
        self.factor = None if model.width_ratio == 1.0 else 1.0 / model.width_ratio
        self.head = built.output_head(parts["head"], self._head_axis(), model.logit_softcap)
        self.modules["head"] = self.head

    def _add_transform(self, model: ModelConfig, parts: Parts) -> None:
        """Register the modules that come before the head. This class has no such modules;
        subclasses may have some."""

    def _head_axis(self) -> TensorAxis:
        """Return the tensor axis over which the columns of the output head are divided."""
        return self.axis

    def transformed(self, x: Tensor) -> Tensor:
        """Return the input of the head, computed from the activations `x`."""
        return x if self.factor is None else x * self.factor

    def token_logits(self, x: Tensor) -> Tensor:
        """Return the logits [..., V/t] of activations [..., h]."""
        return self.head(self.transformed(x))

    def logits(self, batch: Microbatch, x: Tensor) -> Tensor:
        """Return the logits at all positions that have labels. In this class, all positions have
        labels: [s, b, V/t]."""
        return self.token_logits(x)

    def of_all(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return the output of each head for the activations [s, b, h] at all positions (without
        sequence parallelism)."""
        return (self.token_logits(x),)

    def losses(self, batch: Microbatch, x: Tensor, context: Context) -> dict[str, Tensor]:
        """Return the losses by name, each summed over the microbatch; see `Output.losses`."""
        return self.token_losses(batch, self.token_logits(x))

    def token_losses(self, batch: Microbatch, logits: Tensor) -> dict[str, Tensor]:
        """Return the losses of the tokens of `batch` by name, computed from their logits."""
        if self.loss is None:
            kernels = self.head.kernels
            axis = self.axis
            loss = cross_entropy(logits, batch.labels, batch.weights, axis, kernels=kernels)
            return {TASK: loss}
        return self.loss(logits, batch)


class MaskedOutput(TokenOutput):
    """The output of a masked language model: the logits of masked tokens and, if the model predicts
    the order of two segments, the logits of the segment order."""

    def __init__(self, model: ModelConfig, parts: Parts, axis: TensorAxis) -> None:
        super().__init__(model, parts, axis)
        self.sentence: SentenceOrder | None = None
        if "sentence.order" in parts:
            self.sentence = SentenceOrder(parts)
            self.modules["sentence"] = self.sentence

    def _add_transform(self, model: ModelConfig, parts: Parts) -> None:
        self.mlm: MaskedTransform | None = None
        if "mlm.dense" in parts:
            self.mlm = MaskedTransform(model, parts)
            self.modules["mlm"] = self.mlm

    def _head_axis(self) -> TensorAxis:
        # every tensor rank has all masked positions, so the head is computed without sequence
        # parallelism
        return TensorAxis(self.axis.comm)

    def transformed(self, x: Tensor) -> Tensor:
        """Return the activations after BERT's linear, GELU and norm, if the model has these
        modules."""
        if self.mlm is None:
            return x
        return self.mlm(x)

    def logits(self, batch: Microbatch, x: Tensor) -> Tensor:
        """Return the logits [k, b, V/t] at the k masked positions of each sequence."""
        if batch.masked is None:
            return self.token_logits(x)
        return self.token_logits(select_positions(x, batch.masked, self.axis))

    def of_all(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return the logits at all positions, and the logits of the segment order [b, 2]."""
        tokens = self.token_logits(x)
        if self.sentence is None:
            return (tokens,)
        return tokens, self.sentence(x[0])

    def losses(self, batch: Microbatch, x: Tensor, context: Context) -> dict[str, Tensor]:
        """Return the loss of the masked tokens and, if the model predicts the segment order, the
        loss of the segment orders."""
        if batch.masked is None:
            return super().losses(batch, x, context)
        first = torch.zeros_like(batch.masked[:1])
        x = select_positions(x, torch.cat((first, batch.masked)), self.axis)
        losses = self.token_losses(batch, self.token_logits(x[1:]))
        if self.sentence is None:
            return losses
        assert batch.order is not None, "the batch must have the segment order"
        logits = self.sentence(x[0]).to(losses[TASK].dtype)
        order = F.cross_entropy(logits, batch.order, ignore_index=-1, reduction="sum")
        return {**losses, ORDER: order}


class ClassOutput(Output):
    """The output of a model that classifies sequences: the scores of classes, or of candidate
    answers, from the activation at one position of each sequence."""

    def __init__(self, model: ModelConfig, parts: Parts, axis: TensorAxis) -> None:
        super().__init__(model, parts, axis)
        self.classes = Classes(model, parts, axis)
        self.modules["sentence"] = self.classes

    def scores(self, batch: Microbatch, x: Tensor, context: Context) -> Tensor:
        """Return the scores [samples, n] of the n classes, or of the n candidates of each sample,
        in float32 at least."""
        assert batch.masked is not None, "the batch must have the positions that are scored"
        x = select_positions(x, batch.masked, self.axis)  # [1, b, h]
        scores = self.classes(x, context)
        # the candidates of a sample are consecutive sequences of the microbatch
        scores = scores.view(batch.labels.shape[1], -1)
        return scores.to(torch.promote_types(scores.dtype, torch.float32))

    def losses(self, batch: Microbatch, x: Tensor, context: Context) -> dict[str, Tensor]:
        """Return the loss of the samples, and the number of correctly classified samples."""
        scores = self.scores(batch, x, context)
        labels = batch.labels[0]
        losses = F.cross_entropy(scores, labels, reduction="none")
        right = (scores.argmax(-1) == labels).to(losses.dtype)
        if batch.weights is not None:
            weights = batch.weights[0].to(losses.dtype)
            losses = losses * weights
            right = right * weights
        return {TASK: losses.sum(), RIGHT: right.sum()}


def loss_of(
    config: Config, vocab_size: int, axis: TensorAxis, context: ContextAxis
) -> OutputLoss | None:
    """Return the loss that a run uses instead of the cross-entropy; None if it uses the
    cross-entropy. Raise InputError for a loss that cannot be imported."""
    if config.preference.compares:
        kind = "preference"
    elif config.distillation.teaches:
        kind = "distillation"
    elif config.run.loss:
        kind = "own"
    else:
        return None
    loss: OutputLoss = built_in(LOSSES[kind]).of(config, vocab_size, axis, context)
    return loss


def output_of(model: ModelConfig, vocab_size: int, axis: TensorAxis) -> Output:
    """Return the output of a model, with the modules that `plan.shape.parameters` describes."""
    parts = parameters.head(model, vocab_size)
    if model.classifies:
        return ClassOutput(model, parts, axis)
    if model.masked:
        return MaskedOutput(model, parts, axis)
    return TokenOutput(model, parts, axis)
