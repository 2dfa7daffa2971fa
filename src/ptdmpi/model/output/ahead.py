"""Multi-token prediction: modules after the last layer, which predict tokens further ahead
(DeepSeek-AI 2024, V3: arXiv 2412.19437, section 2.2). Only training computes them; validations and
generation use the model without them.

In the shapes below, s is the number of positions, b the number of sequences and h the hidden size.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from ptdmpi.config import ModelConfig
from ptdmpi.model import built
from ptdmpi.model.batch import Microbatch
from ptdmpi.model.experts.exchange import ExpertAxis
from ptdmpi.model.operators import Build, Context, install, run
from ptdmpi.model.output.cross_entropy import cross_entropy
from ptdmpi.model.output.heads import TokenOutput
from ptdmpi.model.output.losses import TASK, ahead_name
from ptdmpi.model.parameters import Parameter
from ptdmpi.model.sequence.ahead import TokensAhead
from ptdmpi.model.sequence.context import ContextAxis
from ptdmpi.model.tables import look_up
from ptdmpi.model.tensor_parallel import TensorAxis
from ptdmpi.model.transformer import Layered
from ptdmpi.plan.layer.ahead.modules import MODULES, TABLE, inner, plain
from ptdmpi.plan.layer.parts import Parts


class Module(Layered):
    """A module for multi-token prediction. It normalizes an activation and an embedding separately,
    and concatenates the results. A linear layer, a transformer layer and a last norm follow.
    `number` counts the modules from 0. Dropout masks and experts' loads need a layer number: the
    module has the layer number `model.layers` + `number`."""

    def __init__(
        self,
        model: ModelConfig,
        axis: TensorAxis,
        number: int,
        *,
        context: ContextAxis,
        experts: ExpertAxis,
    ) -> None:
        super().__init__()
        build = Build(
            model=plain(model),
            axis=axis,
            layer=model.layers + number,
            selective=False,
            context=context,
            experts=experts,
        )
        self.plain_steps = install(self, inner(model), build)
        self.steps = self.plain_steps

    def forward(self, x: Tensor, embedded: Tensor, context: Context) -> Tensor:
        """Return the normalized activations [s, b, h] from which the output head predicts. `x` are
        the normalized activations of the model, or of the previous module. `embedded` are the
        embeddings of the tokens that are predicted from `x`. Under sequence parallelism, the result
        and both arguments have only this rank's positions."""
        return run(self.steps, {"x": x, "next": embedded}, context)["x"]


class AheadOutput(TokenOutput):
    """The output of a model with modules for multi-token prediction."""

    def __init__(
        self,
        model: ModelConfig,
        parts: Parts,
        axis: TensorAxis,
        *,
        context: ContextAxis,
        experts: ExpertAxis,
    ) -> None:
        super().__init__(model, parts, axis)
        self.extra = [
            Module(model, axis, number, context=context, experts=experts)
            for number in range(model.mtp_modules)
        ]
        owner = nn.Module()
        for number, module in enumerate(self.extra):
            owner.add_module(str(number), module)
        self.table: nn.Module = self.head
        if TABLE in parts:
            self.table = built.word_embedding(parts[TABLE], axis)
            owner.add_module(TABLE.removeprefix(f"{MODULES}."), self.table)
        self.modules[MODULES] = owner

    def losses(self, batch: Microbatch, x: Tensor, context: Context) -> dict[str, Tensor]:
        """Return the losses by name: the task's loss, and the loss of each module. If gradients are
        disabled, as in validation, the modules are not computed, and their losses are 0."""
        losses = super().losses(batch, x, context)
        names = [ahead_name(number) for number in range(len(self.extra))]
        if not torch.is_grad_enabled():
            return {**losses, **{name: torch.zeros_like(losses[TASK]) for name in names}}
        return {**losses, **dict(zip(names, self._ahead(batch, x, context), strict=True))}

    def activations(self, ahead: TokensAhead, x: Tensor, context: Context) -> Iterator[Tensor]:
        """Yield, for each module for which `ahead` has tokens, the normalized activations [s, b, h]
        from which the output head predicts. `x` are the normalized activations of the model."""
        table = self.table.weight
        assert isinstance(table, Parameter)
        for module, ids in zip(self.extra, ahead.ids[:-1], strict=False):
            x = module(x, look_up(ids, table, self.axis), context)
            yield x

    def logits_ahead(self, ahead: TokensAhead, x: Tensor, context: Context) -> tuple[Tensor, ...]:
        """Return the logits of each module; see `Output.logits_ahead`."""
        return tuple(map(self.token_logits, self.activations(ahead, x, context)))

    def _ahead(self, batch: Microbatch, x: Tensor, context: Context) -> Iterator[Tensor]:
        """Yield the loss of each module, summed over the microbatch."""
        ahead = batch.ahead
        assert ahead is not None, "a model with modules is trained on tokens further ahead"
        for number, y in enumerate(self.activations(ahead, x, context)):
            yield cross_entropy(
                self.token_logits(y),
                ahead.ids[number + 1],
                ahead.weights[number],
                self.axis,
                kernels=self.head.kernels,
            )
