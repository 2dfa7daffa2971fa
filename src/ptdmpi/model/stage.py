"""A pipeline stage: the layers of one model chunk, and the activations of the microbatches that
still wait for their backward.

The first stage contains the embedding and the last stage contains the output, so that the runner
needs no special cases. Activations are sent between stages in the form that `Boundary` defines.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ptdmpi.base.plugins import built_in
from ptdmpi.config import Config, ModelConfig
from ptdmpi.model.batch import Microbatch, MicrobatchPass
from ptdmpi.model.boundary import Arrival, Boundary, Departure
from ptdmpi.model.built import declare_as_described
from ptdmpi.model.experts.exchange import ExpertAxis
from ptdmpi.model.low_bit import codes
from ptdmpi.model.operators import Context
from ptdmpi.model.output.heads import AHEAD, ClassOutput, Output, TokenOutput, loss_of, output_of
from ptdmpi.model.parameters import Parameter
from ptdmpi.model.random import RandomStream
from ptdmpi.model.sequence.context import ContextAxis
from ptdmpi.model.sharded import Walk
from ptdmpi.model.tensor_parallel import TensorAxis
from ptdmpi.model.transformer import Block, Embedding, Layered, rotary_table
from ptdmpi.plan.layer.ahead.modules import TABLE
from ptdmpi.plan.layer.low_bit import LowBit
from ptdmpi.plan.schedule.places import EMBEDDING, HEAD, place_of, places_of
from ptdmpi.plan.shape import parameters

if TYPE_CHECKING:
    from ptdmpi.model.experts.mixture import Mixture

# the function that finds the mixtures of experts; only models with experts import it
MIXTURES = "ptdmpi.model.experts.makers:mixtures_in"
TIED_NAME = "embedding.word.weight"


class Stage(nn.Module):
    """The layers `layers` of the model. The first stage also has the embedding before layer 0, and
    the last stage also has the output after the last layer.

    A stage runs the ops of a schedule: `forward_microbatch` is the forward op (F), and
    `backward_microbatch` is the backward op (B). `input_microbatch` (I) and `weight_microbatch` (W)
    are the two parts of a split backward. The inputs of each op are the microbatch and the tensor
    that the op receives from a neighbouring stage. In the shapes below, V is the size of the
    vocabulary and t is the number of tensor ranks.
    """

    def __init__(
        self,
        config: Config,
        vocab_size: int,
        layers: range,
        axis: TensorAxis,
        *,
        context: ContextAxis | None = None,
        experts: ExpertAxis | None = None,
    ) -> None:
        super().__init__()
        model = config.model
        self.axis = axis
        context = context or ContextAxis()
        self.positions = context.positions
        self.seed = config.run.seed
        self.router_losses = model.router_losses
        self.first = layers.start == 0
        self.last = layers.stop == model.layers
        # True if no layer before this stage trains, so that the stage's input needs no gradient
        self.foremost = layers.start <= model.adapt.first_layer
        self.places = places_of(layers, model.layers)
        self.tied = model.shares_table
        # the name of the parameter of the last stage that shares the table of the embedding: the
        # weight of the head, or the table of the modules for multi-token prediction
        self.again = "head.weight" if model.tie_embeddings else f"{TABLE}.weight"
        self.drops = max(model.dropout, model.attention_dropout, model.adapt.dropout) > 0.0
        self.embedding = Embedding(model, axis, vocab_size) if self.first else None
        self.layers = nn.ModuleDict(
            {
                str(i): Block(model, axis, i, config.recompute, context=context, experts=experts)
                for i in layers
            }
        )
        self.rotary: tuple[Tensor, Tensor] | None = None
        self.output: Output | None = None
        if self.last:
            experts = experts or ExpertAxis()
            self.output = _output(model, vocab_size, axis, context=context, experts=experts)
            self.output.loss = loss_of(config, vocab_size, axis, context)
            for name, module in self.output.modules.items():
                self.add_module(name, module)
        # number of a layer, or of a module after the last layer -> mixture of experts
        self.mixtures: dict[int, Mixture] = {}
        if model.experts:
            self.mixtures = built_in(MIXTURES)(self._blocks(model.layers))
        declare_as_described(self, model, vocab_size, layers)
        length = model.seq_length // self.positions.parts
        shape = (length, config.batch.micro_size, model.hidden)
        self.boundary = Boundary(shape, axis, config.parallel.scatter_gather)
        # the `Walk` that is notified whenever the computation reaches the next module of the stage;
        # None if weights and gradients need no communication during the computation
        self.walk: Walk | None = None
        self._idle = False
        self._in_flight: dict[int, tuple[Arrival | None, Departure]] = {}
        self._put_off: dict[int, list[Callable[[], object]]] = {}

    def named_logical_parameters(self) -> list[tuple[str, Parameter]]:
        """Return (logical name, parameter) of all parameters. The table of the embedding has the
        same name in the embedding and after the last layer."""
        renamed = {self.again: TIED_NAME} if self.tied else {}
        return [(renamed.get(name, name), weight) for name, weight in self._weights()]

    def trained_parameters(self) -> list[tuple[str, Parameter]]:
        """Return the parameters of `named_logical_parameters` that train."""
        return [
            (name, weight)
            for name, weight in self.named_logical_parameters()
            if weight.declaration.trains
        ]

    def parameters_by_place(self) -> dict[str, list[Parameter]]:
        """Return the parameters that each module (`place`) of the stage uses. The modules are in
        the order of the forward."""
        by_place: dict[str, list[Parameter]] = {place: [] for place in self.places}
        for name, weight in self._weights():
            by_place[place_of(name)].append(weight)
        return by_place

    def place_tables(self, model: ModelConfig, device: torch.device) -> None:
        """Compute the tables that all layers share: the cosines and sines of rotary angles, and the
        levels of quantization codes."""
        form = LowBit.of(model.quantize)
        if form is not None:
            codes.place_tables(form, device)
        if model.positions == "rope" and self.layers:
            # convert the tables to the compute type here, because otherwise each layer would make a
            # converted copy
            compute = next(self.parameters()).dtype
            cos, sin = rotary_table(model, device)
            cos, sin = cos.to(compute), sin.to(compute)
            self.rotary = (cos, sin)
            here = (self.positions.of(cos), self.positions.of(sin))
            for _, block in self._blocks(model.layers):
                block.place_rotary(here)

    def _blocks(self, count: int) -> Iterator[tuple[int, Layered]]:
        """Yield (number, module) of each layer, and of each module for multi-token prediction. The
        numbers of these modules begin with `count`, the number of layers of the model."""
        for number, block in self.layers.items():
            assert isinstance(block, Block)
            yield int(number), block
        if self.output is not None:
            yield from enumerate(self.output.extra, count)

    def begin_step(self) -> None:
        """Discard the incomplete work of an interrupted step. The runner calls this method before
        the ops of a step."""
        self._in_flight = {}
        self._put_off = {}
        if self.walk is not None:
            self.walk.begin_step()
        for mixture in self.mixtures.values():
            mixture.begin_step()
        # True if the backward has nothing to compute: no layer before this stage trains, and no
        # weight of this stage trains
        self._idle = self.foremost and not any(weight.requires_grad for weight in self.parameters())

    @property
    def in_flight(self) -> int:
        """Return the number of microbatches whose activations are in memory for their backward."""
        return len(self._in_flight)

    def logits(self, batch: Microbatch, x: Tensor | None, step: int | None) -> Tensor:
        """Return the output of this stage. On the last stage of a model that predicts tokens, the
        output is the logits for this rank's part of the vocabulary. They are [s, b, V/t] at all
        positions or, for a masked language model, [k, b, V/t] at the k masked positions of each
        sequence. For the arguments see `hidden`."""
        x = self.hidden(batch, x, step)
        return self.output.logits(batch, x) if isinstance(self.output, TokenOutput) else x

    def hidden(self, batch: Microbatch, x: Tensor | None, step: int | None) -> Tensor:
        """Return the output of this stage's layers for the token ids of the batch (first stage), or
        for the stage's input `x` (other stages). `step` is the number of the training step, which
        determines the dropout; None means no dropout."""
        return self.advance(batch.inputs, x, self._context(batch, step), batch.types)

    def advance(
        self, ids: Tensor, x: Tensor | None, context: Context, types: Tensor | None = None
    ) -> Tensor:
        """Return the output of this stage's layers for the token ids (first stage), or for the
        stage's input `x` (other stages). On the last stage, the final norm is also applied. `types`
        has the segment of each token."""
        if self.embedding is not None:
            if self.walk is not None:
                self.walk.forward(EMBEDDING)
            x = self.embedding(ids, context, types)
        assert x is not None, "a stage without an embedding needs an input"
        for place, block in self.layers.items():
            x = block(self._enter(place, x), context)
        if self.last:
            x = self._enter(HEAD, x)
        return x if self.output is None else self.output.normalized(x)

    def _enter(self, place: str, x: Tensor) -> Tensor:
        return x if self.walk is None else self.walk.enter(place, x)

    def _context(self, batch: Microbatch, step: int | None) -> Context:
        stream = rotary = None
        if self.drops and step is not None:
            stream = RandomStream.of(self.seed, step, batch.samples, self.positions)
        if self.rotary is not None and batch.documents is not None:
            # select the cosines and sines [s, 1, 1, head size] by each token's position in its
            # document: [s, b, 1, head size]
            (cos, sin) = self.rotary
            at = self.positions.of(batch.documents.positions)
            rotary = (cos[at, 0], sin[at, 0])
        return Context(stream, batch.documents, rotary, positions=self.positions)

    def heads(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return the output of each head for x, the last stage's activations [s, b, h], which are
        not divided over the tensor ranks. The first output has the logits for this rank's part of
        the vocabulary at all positions, [s, b, V/t]. If the model predicts the segment order, the
        second output has the logits of the segment order, [b, 2]."""
        assert isinstance(self.output, TokenOutput), "only an output of tokens has heads"
        return self.output.of_all(x)

    def heads_ahead(self, batch: Microbatch, x: Tensor) -> tuple[Tensor, ...]:
        """Return the logits [s, b, V/t] of each module for multi-token prediction for which
        `batch.ahead` has tokens. `x` has the last stage's activations [s, b, h], which are not
        divided over the tensor ranks. There is no dropout."""
        if batch.ahead is None:
            return ()
        assert self.output is not None, "only the last stage predicts"
        return self.output.logits_ahead(batch.ahead, x, self._context(batch, None))

    def scores(self, batch: Microbatch, x: Tensor, step: int | None) -> Tensor:
        """Return the scores [samples, n] of the n classes, or of the n candidates of each sample,
        for the last stage's activations `x`, in float32 or wider. For `step` see `hidden`."""
        assert isinstance(self.output, ClassOutput), "only an output of classes has scores"
        return self.output.scores(batch, x, self._context(batch, step))

    def forward_microbatch(self, microbatch: MicrobatchPass, x: Tensor | None) -> Tensor | None:
        """Run the forward op (F). Return the output to send, or None on the last stage, which
        stores the losses in the microbatch.

        If gradients are enabled, the tensors for the backward stay in memory until the backward op.
        """
        batch = microbatch.batch
        training = torch.is_grad_enabled()
        arrival = None
        if x is not None and training and not self.foremost:
            arrival = Arrival()
            x = arrival.begin(x)
        context = self._context(batch, microbatch.step)
        if training and self.router_losses:
            context = replace(context, factors=microbatch.factors(self.router_losses))
        y = self.advance(batch.inputs, x, context, batch.types)
        if self.output is not None:
            y = microbatch.take(self.output.losses(batch, y, context))
        if training and not self._idle:
            # store only the autograd graph, so that the memory of the output can be freed once it
            # is sent
            self._in_flight[microbatch.number] = (arrival, Departure(y))
        return None if self.last else y.detach()

    def backward_microbatch(self, microbatch: MicrobatchPass, dy: Tensor | None) -> Tensor | None:
        """Run the backward op (B), and free the activations. `dy` is the gradient of this stage's
        output; None on the last stage. Return the gradient of this stage's input; None on the first
        stage.

        The gradients of parameters are added to `main_grad`. If no layer before this stage trains,
        the gradient of this stage's input is a tensor of zeros. These zeros are still sent to the
        previous stage, because the schedule is the same for all models. If neither this stage nor
        an earlier stage has a parameter that trains, nothing is computed.
        """
        if self._idle:
            return self._no_gradient()
        arrival, departure = self._in_flight.pop(microbatch.number)
        if self.last:
            assert microbatch.total is not None, "the forward has stored the loss"
            # the backward begins with the gradient of the total loss, which is `scale` (see
            # `MicrobatchPass`)
            dy = torch.full_like(microbatch.total, microbatch.scale)
        if self.walk is not None:
            self.walk.backward(self.places[-1])
        departure.backward(dy)
        if self.walk is not None:
            self.walk.finish()
        return self._no_gradient() if arrival is None else arrival.gradient

    def _no_gradient(self) -> Tensor | None:
        if self.first:
            return None
        like = next(self.parameters())
        return torch.zeros(self.boundary.shape, dtype=like.dtype, device=like.device)

    def input_microbatch(self, microbatch: MicrobatchPass, dy: Tensor | None) -> Tensor | None:
        """Run the first part of a split backward (op I), and free the activations. Return the
        gradient of this stage's input, as `backward_microbatch` does.

        All additions to gradients of parameters, including norms and biases, are deferred until
        `weight_microbatch`. Otherwise, op I of a later microbatch would change the gradient before
        op W of this microbatch completes it.
        """
        later: list[Callable[[], object]] = []
        try:
            for _, weight in self._weights():
                weight.later = later
            return self.backward_microbatch(microbatch, dy)
        finally:
            for _, weight in self._weights():
                weight.later = None
            self._put_off[microbatch.number] = later

    def weight_microbatch(self, microbatch: MicrobatchPass, nothing: Tensor | None) -> None:
        """Run the second part of a split backward (op W): add to `main_grad` the contributions that
        `input_microbatch` has deferred, in the same order as `backward_microbatch`. This op
        receives no tensor, so `nothing` is None."""
        later = self._put_off.pop(microbatch.number)
        # reverse the list, because pop() removes elements from its end, and the oldest element must
        # be used first
        later.reverse()
        with torch.no_grad():
            while later:
                # remove the function from the list before the call, so that the tensors to which it
                # refers are freed after the call
                later.pop()()

    def _weights(self) -> Iterator[tuple[str, Parameter]]:
        for name, weight in self.named_parameters():
            assert isinstance(weight, Parameter), f"{name} is not declared"
            yield name, weight


def _output(
    model: ModelConfig,
    vocab_size: int,
    axis: TensorAxis,
    *,
    context: ContextAxis,
    experts: ExpertAxis,
) -> Output:
    """Return the output of a model."""
    if model.mtp_modules:
        parts = parameters.head(model, vocab_size)
        ahead: Output = built_in(AHEAD)(model, parts, axis, context=context, experts=experts)
        return ahead
    return output_of(model, vocab_size, axis)
