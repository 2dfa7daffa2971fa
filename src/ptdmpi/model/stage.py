"""A pipeline stage: the layers of one model chunk, and the activations of its microbatches in
flight.

The first stage contains the embedding and the last one the output, so that the runner needs no
special cases. Activations are sent between stages in the form of the stage's boundary.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn

from ptdmpi.config import Config, ModelConfig
from ptdmpi.model.batch import Microbatch, MicrobatchPass
from ptdmpi.model.boundary import Arrival, Boundary, Departure
from ptdmpi.model.built import declare_as_described
from ptdmpi.model.experts.exchange import ExpertAxis
from ptdmpi.model.experts.mixture import Mixture
from ptdmpi.model.low_bit import codes
from ptdmpi.model.operators import Context
from ptdmpi.model.output.heads import ClassOutput, Output, TokenOutput, loss_of, output_of
from ptdmpi.model.parameters import Parameter
from ptdmpi.model.random import RandomStream
from ptdmpi.model.sequence.context import ContextAxis
from ptdmpi.model.sharded import Walk
from ptdmpi.model.tensor_parallel import TensorAxis
from ptdmpi.model.transformer import Block, Embedding, rotary_table
from ptdmpi.plan.layer.low_bit import LowBit
from ptdmpi.plan.schedule.places import EMBEDDING, HEAD, place_of, places_of

TIED_NAME = "embedding.word.weight"


class Stage(nn.Module):
    """Layers [begin, end) of the model. The first stage has the embedding before layer 0, the last
    one the output after the last layer.

    A stage runs the ops of a schedule: `forward_microbatch` and `backward_microbatch` are its F and
    B, `input_microbatch` and `weight_microbatch` its I and W, the two parts of a B. The inputs of
    each are the microbatch and the tensor that the op receives from a neighbour.
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
        # no layer before this stage trains, so the input needs no gradient
        self.foremost = layers.start <= model.adapt.first_layer
        self.places = places_of(layers, model.layers)
        self.tied = model.tie_embeddings
        self.drops = max(model.dropout, model.attention_dropout, model.adapt.dropout) > 0.0
        self.embedding = Embedding(model, axis, vocab_size) if self.first else None
        self.layers = nn.ModuleDict(
            {
                str(i): Block(model, axis, i, config.recompute, context=context, experts=experts)
                for i in layers
            }
        )
        # the mixtures of experts by the numbers of their layers
        self.mixtures = {
            int(number): module
            for number, block in self.layers.items()
            for module in block.modules()
            if isinstance(module, Mixture)
        }
        self.rotary: tuple[Tensor, Tensor] | None = None
        self.output: Output | None = None
        if self.last:
            self.output = output_of(model, vocab_size, axis)
            self.output.loss = loss_of(config, vocab_size, axis, context)
            for name, module in self.output.modules.items():
                self.add_module(name, module)
        declare_as_described(self, model, vocab_size, layers)
        length = model.seq_length // self.positions.parts
        shape = (length, config.batch.micro_size, model.hidden)
        self.boundary = Boundary(shape, axis, config.parallel.scatter_gather)
        # if weights or gradients are sharded, the walk is notified which module of the stage is
        # computed
        self.walk: Walk | None = None
        self._idle = False
        self._in_flight: dict[int, tuple[Arrival | None, Departure]] = {}
        self._put_off: dict[int, list[Callable[[], object]]] = {}

    def named_logical_parameters(self) -> list[tuple[str, Parameter]]:
        """Return (logical name, parameter) of all parameters; a tied head has the embedding's
        name."""
        renamed = {"head.weight": TIED_NAME} if self.tied else {}
        return [(renamed.get(name, name), weight) for name, weight in self._weights()]

    def trained_parameters(self) -> list[tuple[str, Parameter]]:
        """Return those parameters of `named_logical_parameters` that have gradients."""
        return [
            (name, weight)
            for name, weight in self.named_logical_parameters()
            if weight.declaration.trains
        ]

    def parameters_by_place(self) -> dict[str, list[Parameter]]:
        """Return the parameters that each module (`place`) of the stage uses, in the order of its
        forward."""
        by_place: dict[str, list[Parameter]] = {place: [] for place in self.places}
        for name, weight in self._weights():
            by_place[place_of(name)].append(weight)
        return by_place

    def place_tables(self, model: ModelConfig, device: torch.device) -> None:
        """Compute the tables that all layers share: the rotary angles, and the values of
        quantization codes."""
        form = LowBit.of(model.quantize)
        if form is not None:
            codes.place_tables(form, device)
        if model.positions == "rope" and self.layers:
            # convert to the compute type here; if each layer converted, each would have a copy
            compute = next(self.parameters()).dtype
            cos, sin = rotary_table(model, device)
            cos, sin = cos.to(compute), sin.to(compute)
            self.rotary = (cos, sin)
            here = (self.positions.of(cos), self.positions.of(sin))
            for block in self.layers.values():
                assert isinstance(block, Block)
                block.place_rotary(here)

    def begin_step(self) -> None:
        """Discard the incomplete work of an interrupted step. The runner calls this before the
        ops."""
        self._in_flight = {}
        self._put_off = {}
        if self.walk is not None:
            self.walk.begin_step()
        for mixture in self.mixtures.values():
            mixture.begin_step()
        # an input has a gradient if a layer before it trains, even if no weight of this stage
        # trains
        self._idle = self.foremost and not any(weight.requires_grad for weight in self.parameters())

    @property
    def in_flight(self) -> int:
        """Return the number of microbatches whose activations are in memory."""
        return len(self._in_flight)

    def logits(self, batch: Microbatch, x: Tensor | None, step: int | None) -> Tensor:
        """Return this stage's output. On the last stage the results are the logits for this rank's
        part of the vocabulary, at all positions [s, b, V/t] or at the masked ones [k, b, V/t]."""
        x = self.hidden(batch, x, step)
        return self.output.logits(batch, x) if isinstance(self.output, TokenOutput) else x

    def hidden(self, batch: Microbatch, x: Tensor | None, step: int | None) -> Tensor:
        """Return the output of this stage's layers for the batch, or for the stage's input `x`."""
        return self.advance(batch.inputs, x, self._context(batch, step), batch.types)

    def advance(
        self, ids: Tensor, x: Tensor | None, context: Context, types: Tensor | None = None
    ) -> Tensor:
        """Return the output of this stage's layers for the token ids, or for the stage's input
        `x`."""
        if self.embedding is not None:
            if self.walk is not None:
                self.walk.forward(EMBEDDING)
            x = self.embedding(ids, context, types)
        assert x is not None, "only the first stage makes its own input"
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
            # [s, 1, 1, head size] -> [s, b, 1, head size]
            (cos, sin) = self.rotary
            at = self.positions.of(batch.documents.positions)
            rotary = (cos[at, 0], sin[at, 0])
        return Context(stream, batch.documents, rotary, positions=self.positions)

    def heads(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return the output of each head for the last stage's activations, without sequence
        parallelism: the logits for this rank's part of the vocabulary at all positions [s, b, V/t],
        and the logits of a sentence order [b, 2]."""
        assert isinstance(self.output, TokenOutput), "a last stage with logits of tokens"
        return self.output.of_all(x)

    def scores(self, batch: Microbatch, x: Tensor, step: int | None) -> Tensor:
        """Return the scores [samples, n] of each class, or of each candidate, for the last stage's
        activations, in float32 or wider."""
        assert isinstance(self.output, ClassOutput), "a last stage with scores of classes"
        return self.output.scores(batch, x, self._context(batch, step))

    def forward_microbatch(self, microbatch: MicrobatchPass, x: Tensor | None) -> Tensor | None:
        """Run the forward op (F). Return the output to send, or None on the last stage, which
        stores the losses in the microbatch.

        If gradients are enabled, the tensors for the backward pass stay in memory until then.
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
            # keep only the graph: the memory of the output can be freed after it has been passed on
            self._in_flight[microbatch.number] = (arrival, Departure(y))
        return None if self.last else y.detach()

    def backward_microbatch(self, microbatch: MicrobatchPass, dy: Tensor | None) -> Tensor | None:
        """Run the backward op (B). Return the gradient of this stage's input, None on the first
        stage, and free the activations.

        Weight gradients are added to each parameter's main_grad. If no layer before this stage
        trains, the gradient of its input is zeros. The zeros are sent nevertheless, because the
        schedule is the same for all models. If no parameter of the stage trains either, nothing is
        computed.
        """
        if self._idle:
            return self._no_gradient()
        arrival, departure = self._in_flight.pop(microbatch.number)
        if self.last:
            assert microbatch.total is not None, "its forward has left the loss"
            # nothing follows the loss: its gradient is its weight in the mean over the global batch
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
        """Run I, the first part of a backward: return the gradient of this stage's input, as B
        does, and free the activations.

        All weight gradients that B would add, including the gradients of norms and biases, are
        deferred until W. Weight gradients therefore never belong to a later microbatch than the one
        whose gradient W completes.
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
        """Run W, the second part of a backward: add the gradients that I has deferred to each
        parameter's main_grad, in the order of B."""
        later = self._put_off.pop(microbatch.number)
        # pop() takes from the end: reversed, it takes the oldest first, in the order in which B
        # would have added
        later.reverse()
        with torch.no_grad():
            while later:
                later.pop()()  # this also frees the tensors that the deferred function has kept

    def _weights(self) -> Iterator[tuple[str, Parameter]]:
        for name, weight in self.named_parameters():
            assert isinstance(weight, Parameter), f"{name} is not declared"
            yield name, weight
