"""A stage: the layers of one model chunk, and the activations of its microbatches in flight.

The stage owns what is special about the first and the last one (embedding, head and loss), so that
the runner needs no such cases. Its boundary owns the form in which activations travel.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ptdmpi.config import Config, ModelConfig
from ptdmpi.model import built
from ptdmpi.model.batch import Arrival, Batch, Departure
from ptdmpi.model.loss import cross_entropy
from ptdmpi.model.low_bit import codes
from ptdmpi.model.parameters import Parameter
from ptdmpi.model.random import RandomStream
from ptdmpi.model.sharded import Walk
from ptdmpi.model.tensor_parallel import TensorAxis, select_positions
from ptdmpi.model.transformer import (
    Block,
    Classes,
    Context,
    Embedding,
    MaskedTransform,
    Norm,
    SentenceOrder,
    rotary_table,
)
from ptdmpi.plan.schedule.places import EMBEDDING, HEAD, place_of, places_of
from ptdmpi.plan.shape import parameters
from ptdmpi.plan.shape.low_bit import LowBit

TIED_NAME = "embedding.word.weight"


class Boundary:
    """The form of an activation [s, b, h] (or of its gradient) between two stages.

    With `scatter_gather` (Narayanan et al. 2021, section 4.1), the ranks of a tensor group, which
    hold equal activations, send 1/t of it each, and the receivers gather it. Under sequence
    parallelism it is divided anyway.
    """

    def __init__(self, shape: tuple[int, ...], axis: TensorAxis, scatter_gather: bool) -> None:
        self.axis = axis
        if axis.divides_sequence:
            shape = (shape[0] // axis.size, *shape[1:])
        elements = torch.Size(shape).numel()
        self.shape = shape
        self.scattered = scatter_gather and axis.size > 1 and not axis.divides_sequence
        # shares are of one length: a tensor that t does not divide travels whole
        self.scattered = self.scattered and elements % axis.size == 0
        self.wire_elements = elements // axis.size if self.scattered else elements

    def pack(self, x: Tensor) -> Tensor:
        """What this rank sends of `x`: flat and contiguous."""
        # a value travels, no graph: the next stage begins its own, and B brings the gradient back
        return self.axis.share(x) if self.scattered else x.detach().contiguous().view(-1)

    def unpack(self, received: Tensor) -> Tensor:
        """The activation again, from what arrived."""
        if self.scattered:
            received = self.axis.from_shares(received)
        return received.view(self.shape)


class Stage(nn.Module):
    """Layers [begin, end) of the model, with the embedding before layer 0 and the head after the
    last one.

    `forward_microbatch` and `backward_microbatch` are what a schedule's F and B stand for,
    `input_microbatch` and `weight_microbatch` its I and W, the two parts of a B.
    """

    def __init__(self, config: Config, vocab_size: int, layers: range, axis: TensorAxis) -> None:
        super().__init__()
        model = config.model
        self.axis = axis
        self.seed = config.run.seed
        self.first, self.last = layers.start == 0, layers.stop == model.layers
        # nothing in front of it trains: no gradient is made for that
        self.foremost = layers.start <= model.adapt.first_layer
        self.places = places_of(layers, model.layers)
        self.tied = model.tie_embeddings
        self.drops = max(model.dropout, model.attention_dropout, model.adapt.dropout) > 0.0
        self.embedding = Embedding(model, axis, vocab_size) if self.first else None
        self.layers = nn.ModuleDict(
            {str(i): Block(model, axis, i, config.recompute) for i in layers}
        )
        self.rotary: tuple[Tensor, Tensor] | None = None
        self._make_head(model, vocab_size)
        self._freeze(model, vocab_size)
        self._put_in_few_bits(model)
        shape = (model.seq_length, config.batch.micro_size, model.hidden)
        self.boundary = Boundary(shape, axis, config.parallel.scatter_gather)
        # where weights or gradients are sharded: told which part of the stage is computed
        self.walk: Walk | None = None
        self.losses: dict[int, Tensor] = {}
        self.order_losses: dict[int, Tensor] = {}
        self.right: dict[int, Tensor] = {}  # samples that were classified right
        self._batches: dict[int, Batch] = {}
        self._in_flight: dict[int, tuple[Arrival | None, Departure]] = {}
        self._put_off: dict[int, list[Callable[[], object]]] = {}

    def _make_head(self, model: ModelConfig, vocab_size: int) -> None:
        self.final_norm = self.mlm = self.head = None
        self.sentence: SentenceOrder | Classes | None = None
        if not self.last:
            return
        # masked positions are few: each rank of the tensor axis takes all of them
        axis = TensorAxis(self.axis.comm) if model.masked else self.axis
        parts = parameters.head(model, vocab_size)
        if "final_norm" in parts:
            self.final_norm = Norm(model)
        if model.classifies:
            self.sentence = Classes(model, parts, self.axis)
            return
        if "mlm.dense" in parts:
            self.mlm = MaskedTransform(model, parts)
        self.head = built.output_head(parts["head"], axis, model.logit_softcap)
        if "sentence.order" in parts:
            self.sentence = SentenceOrder(parts)

    def _freeze(self, model: ModelConfig, vocab_size: int) -> None:
        """Declare what does not train, as the table has it; beneath a linear stand its adapters."""
        groups = [(f"layers.{i}.", parameters.layer(model, int(i))) for i in self.layers]
        groups += [("embedding.", parameters.embedding(model, vocab_size))] * self.first
        groups += [("", parameters.head(model, vocab_size))] * self.last
        for prefix, parts in groups:
            for name in (name for name, part in parts.items() if not part.trains):
                for weight in self.get_submodule(prefix + name).parameters(recurse=False):
                    assert isinstance(weight, Parameter), f"{name} is not declared"
                    weight.declaration = replace(weight.declaration, trains=False)

    def _put_in_few_bits(self, model: ModelConfig) -> None:
        """Declare what products take in few bits: the weights of the layers' linears."""
        parts = parameters.layer(model).items()
        linears = [name for name, part in parts if isinstance(part, parameters.Linear)]
        for i, name in itertools.product(self.layers, linears):
            weight = self.get_parameter(f"layers.{i}.{name}.weight")
            assert isinstance(weight, Parameter), f"{name} is not declared"
            form = LowBit.of(model.quantize)
            weight.declaration = replace(weight.declaration, low_bit=form)

    def named_logical_parameters(self) -> list[tuple[str, Parameter]]:
        """(logical name, parameter); a tied head goes by the embedding's name."""
        renamed = {"head.weight": TIED_NAME} if self.tied else {}
        return [(renamed.get(name, name), weight) for name, weight in self._weights()]

    def trained_parameters(self) -> list[tuple[str, Parameter]]:
        """Those of `named_logical_parameters` that have gradients."""
        return [
            (name, weight)
            for name, weight in self.named_logical_parameters()
            if weight.declaration.trains
        ]

    def parameters_by_place(self) -> dict[str, list[Parameter]]:
        """What each place of the stage uses, in the order of its forward."""
        found: dict[str, list[Parameter]] = {place: [] for place in self.places}
        for name, weight in self._weights():
            found[place_of(name)].append(weight)
        return found

    def place_tables(self, model: ModelConfig, device: torch.device) -> None:
        """Make what is computed once for all layers: the rotary angles, and what few bits mean."""
        form = LowBit.of(model.quantize)
        if form is not None:
            codes.place_tables(form, device)
        if model.positions == "rope" and self.layers:
            # in the compute type: a conversion in each layer would be a copy to keep
            compute = next(self.parameters()).dtype
            cos, sin = rotary_table(model, device)
            self.rotary = (cos.to(compute), sin.to(compute))
            for block in self.layers.values():
                assert isinstance(block, Block)
                block.attention.rotary = self.rotary

    def begin_step(
        self,
        step: int | None,
        batches: list[Batch],
        loss_scale: float,
        order_weight: float = 0.0,
    ) -> None:
        """Take the microbatches of a step. `step` None means evaluation: nothing drops.

        `loss_scale` multiplies the summed loss before its gradient is taken: 1 over the valid
        tokens of the global batch, times fp16's factor. The loss of a sentence order counts as
        that of `order_weight` tokens.
        """
        self._batches = dict(enumerate(batches))
        self._step = step
        self._loss_scale = loss_scale
        self._order_weight = order_weight
        self.losses, self.order_losses, self.right = {}, {}, {}
        if self.walk is not None:
            self.walk.begin_step()
        # an input carries a gradient if something in front trains; perhaps no weight does either
        self._idle = self.foremost and not any(one.requires_grad for one in self.parameters())

    @property
    def in_flight(self) -> int:
        """Microbatches whose activations are held."""
        return len(self._in_flight)

    def logits(self, batch: Batch, x: Tensor | None, step: int | None) -> Tensor:
        """This stage's output; on the last stage the logits of its part of the vocabulary, at all
        positions [s, b, V/t] or at the masked ones [k, b, V/t]."""
        x = self.hidden(batch, x, step)
        if self.head is None:
            return x
        if batch.masked is not None:
            x = select_positions(x, batch.masked, self.axis)
        return self._token_logits(x)

    def hidden(self, batch: Batch, x: Tensor | None, step: int | None) -> Tensor:
        """What this stage's layers make of the batch, or of the stage's input `x`."""
        return self.advance(batch.inputs, x, self._context(batch, step), batch.types)

    def advance(
        self, ids: Tensor, x: Tensor | None, context: Context, types: Tensor | None = None
    ) -> Tensor:
        """What this stage's layers make of the ids, or of the stage's input `x`."""
        if self.embedding is not None:
            if self.walk is not None:
                self.walk.forward(EMBEDDING)
            x = self.embedding(ids, context, types)
        assert x is not None, "only the first stage makes its own input"
        for place, block in self.layers.items():
            x = block(self._enter(place, x), context)
        if self.last:
            x = self._enter(HEAD, x)
        return x if self.final_norm is None else self.final_norm(x)

    def _enter(self, place: str, x: Tensor) -> Tensor:
        return x if self.walk is None else self.walk.enter(place, x)

    def _context(self, batch: Batch, step: int | None) -> Context:
        stream = rotary = None
        if self.drops and step is not None:
            stream = RandomStream.of(self.seed, step, batch.samples)
        if self.rotary is not None and batch.documents is not None:
            # [s, 1, 1, head size] -> [s, b, 1, head size]
            (cos, sin), at = self.rotary, batch.documents.positions
            rotary = (cos[at, 0], sin[at, 0])
        return Context(stream, batch.documents, rotary)

    def heads(self, x: Tensor) -> tuple[Tensor, ...]:
        """What each head makes of the last stage's activations, without sequence parallelism: the
        logits of this rank's part of the vocabulary at all positions [s, b, V/t], and those of a
        sentence order [b, 2]."""
        tokens = self._token_logits(x)
        if isinstance(self.sentence, SentenceOrder):
            return tokens, self.sentence(x[0])
        return (tokens,)

    def scores(self, batch: Batch, x: Tensor, step: int | None) -> Tensor:
        """The scores [samples, n] of each class, or of each candidate, that the last stage's
        activations give, in float32 at least."""
        assert isinstance(self.sentence, Classes) and batch.masked is not None
        x = select_positions(x, batch.masked, self.axis)  # [1, b, h]
        scores = self.sentence(x, self._context(batch, step))
        # the candidates of a sample are neighbours in b
        scores = scores.view(batch.labels.shape[1], -1)
        return scores if scores.dtype == torch.float64 else scores.float()

    def _classified(self, batch: Batch, x: Tensor) -> tuple[Tensor, Tensor]:
        """The summed loss of the samples, and how many of them were classified right."""
        scores, labels = self.scores(batch, x, self._step), batch.labels[0]
        losses = F.cross_entropy(scores, labels, reduction="none")
        right = (scores.argmax(-1) == labels).to(losses.dtype)
        if batch.weights is None:
            return losses.sum(), right.sum()
        weights = batch.weights[0].to(losses.dtype)
        return (losses * weights).sum(), (right * weights).sum()

    def _token_logits(self, x: Tensor) -> Tensor:
        assert self.head is not None, "only the last stage has a head"
        return self.head(x if self.mlm is None else self.mlm(x))

    def _loss(self, batch: Batch, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """The summed loss of the tokens, and that of the sentence orders, where they are asked for,
        of the last stage's activations."""
        if batch.masked is None:
            logits = self._token_logits(x)
            return cross_entropy(logits, batch.labels, batch.weights, self.axis), None
        first = torch.zeros_like(batch.masked[:1])
        x = select_positions(x, torch.cat((first, batch.masked)), self.axis)
        loss = cross_entropy(self._token_logits(x[1:]), batch.labels, batch.weights, self.axis)
        if not isinstance(self.sentence, SentenceOrder):
            return loss, None
        assert batch.order is not None, "a model that judges the order of segments needs to know it"
        logits = self.sentence(x[0]).to(loss.dtype)
        return loss, F.cross_entropy(logits, batch.order, ignore_index=-1, reduction="sum")

    def forward_microbatch(self, microbatch: int, x: Tensor | None) -> Tensor | None:
        """F: the output to pass on, or None on the last stage, which keeps the loss instead.

        While gradients are enabled, what the backward pass needs stays held until then.
        """
        batch = self._batches[microbatch]
        training = torch.is_grad_enabled()
        arrival = None
        if x is not None and training and not self.foremost:
            arrival = Arrival()
            x = arrival.begin(x)
        y = self.hidden(batch, x, self._step)
        if isinstance(self.sentence, Classes):
            y, right = self._classified(batch, y)
            self.right[microbatch] = right
            self.losses[microbatch] = y.detach()
        elif self.last:
            y, order = self._loss(batch, y)
            if order is not None:
                self.order_losses[microbatch] = order.detach()
                y = y + self._order_weight * order
            self.losses[microbatch] = y.detach()
        if training and not self._idle:
            # only the graph is kept: the output itself can go once it has been passed on
            self._in_flight[microbatch] = (arrival, Departure(y))
        return None if self.last else y.detach()

    def backward_microbatch(self, microbatch: int, dy: Tensor | None) -> Tensor | None:
        """B: the gradient of this stage's input (None on the first stage); frees the activations.

        Weight gradients are added to each parameter's main_grad. Where nothing in front of a stage
        trains, zeros stand for its input's gradient, which is sent all the same, since the schedule
        is one for all models; and if nothing of it trains either, there is nothing to do.
        """
        if self._idle:
            return self._no_gradient()
        arrival, departure = self._in_flight.pop(microbatch)
        if self.last:
            # nobody hands the loss a gradient: it is its weight in the mean over the global batch
            dy = torch.full_like(self.losses[microbatch], self._loss_scale)
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

    def input_microbatch(self, microbatch: int, dy: Tensor | None) -> Tensor | None:
        """I: the gradient of this stage's input, as B gives it; frees the activations.

        What B would add to the gradients of weights is put off until W, norms and biases as well:
        so they are never ahead of the microbatch whose gradient W completes.
        """
        later: list[Callable[[], object]] = []
        try:
            for _, weight in self._weights():
                weight.later = later
            return self.backward_microbatch(microbatch, dy)
        finally:
            for _, weight in self._weights():
                weight.later = None
            self._put_off[microbatch] = later

    def weight_microbatch(self, microbatch: int, nothing: Tensor | None) -> None:
        """W: adds what I has put off to each parameter's main_grad, in the order of B."""
        later = self._put_off.pop(microbatch)
        # pop() takes from the end: so the oldest first, in the order in which B would have added
        later.reverse()
        with torch.no_grad():
            while later:
                later.pop()()  # and what it has kept is free again

    def _weights(self) -> Iterator[tuple[str, Parameter]]:
        for name, weight in self.named_parameters():
            assert isinstance(weight, Parameter), f"{name} is not declared"
            yield name, weight
