"""The experts of a layer: the computation of each expert for its tokens, and the weighted sum of
the experts' outputs.

No token is dropped. The output of a token is a sum over its experts, which is always computed in
ascending order of the experts' numbers. The output therefore does not depend on other tokens, or on
how the batch is divided. Either the tensor axis divides the width of each expert, or experts are
whole and each tensor rank routes its own tokens (`tokens.py`). If the tensor axis divides the
experts, each tensor rank computes partial outputs, as in a row-parallel linear, and partial
gradients. The router's gradient is linear in these partial gradients. Each rank therefore computes
a partial gradient of the router, and the layer sends no additional message for the router. The
router's contribution to the input's gradient is summed over the tensor ranks together with the
contribution of the experts. The gradient of the router's weight is summed at the end of a step,
together with other partial gradients.

If the experts are divided among ranks (`exchange.py`), the rank that has an expert computes the
rows (activations of one token each) that all ranks send to this expert. If the results can be
bitwise equal to data parallelism without divided experts (`Layout.computes_by_source`), this rank
computes the gradient of a weight separately for each source rank, and adds these gradients in
ascending order of ranks.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import Function

from ptdmpi.comm.communicator import Communicator, OneRank
from ptdmpi.model.adapters.low_rank import LowRankAdapter
from ptdmpi.model.built import column_linear, row_linear
from ptdmpi.model.experts.exchange import Dispatch, ExpertAxis, RowCounts
from ptdmpi.model.experts.routing import Chosen, Routing, Segment, SequenceLoads
from ptdmpi.model.experts.tokens import TensorTokens
from ptdmpi.model.kernels import Computing, Kernels
from ptdmpi.model.kernels.activation import ActivationFunction, GeluForm, chunk_rows
from ptdmpi.model.parameters import Parameter, declare
from ptdmpi.model.tensor_parallel import LinearPass, TensorAxis
from ptdmpi.plan.layer.experts import MixExperts
from ptdmpi.plan.layout.grid import EXPERT_AXES, SAME_EXPERTS

# The number of outputs of an expert's first linear whose activation a CPU computes at once.
AT_ONCE = 1 << 16
# A multiple of the number of elements that PyTorch's kernels on a CPU compute in one iteration.
# This number is at most 64: two registers of 64 bytes in a 16-bit type (torch 2.13).
VECTORS = 64


class Router(nn.Module):
    """A router for E experts: its weight [E, hidden], and its balance numbers [E], one for each
    expert. Every tensor rank has a full copy of both. The balance numbers help to give all experts
    equally many tokens (see `Routing`). They change at the end of each step
    (`engine/loads.py`)."""

    def __init__(self, row: MixExperts) -> None:
        super().__init__()
        shape = (row.count, row.router.inputs)
        self.weight = declare(1, shape, row.router.init_std, partial_gradient=True)
        self.balance = declare(1, shape[:1], "zeros") if row.router.bias else None


class Expert(nn.Module):
    """The two linears of an expert, with their adapters. The mixture does not call these modules;
    it uses only their parameters. If experts are whole (`ExpertAxis.whole`), each tensor rank has
    the whole width of the expert."""

    def __init__(self, row: MixExperts, axis: TensorAxis, dealt: ExpertAxis) -> None:
        super().__init__()
        if dealt.whole:
            axis = TensorAxis(OneRank())
        parts = row.of_expert()
        self.up = column_linear(parts, "up", axis)
        self.down = row_linear(parts, "down", axis)
        apart = EXPERT_AXES if dealt.size > 1 else ()
        for weight in self.parameters():
            assert isinstance(weight, Parameter)
            weight.declaration = replace(weight.declaration, apart=apart)
        for linear, outputs in ((self.up, row.up.outputs), (self.down, ())):
            if dealt.whole:
                over = (SAME_EXPERTS,)
                linear.weight.declaration = replace(
                    linear.weight.declaration, split=None, rows_over=over, parts=outputs
                )


class ExpertLinear(NamedTuple):
    """The weight of one of an expert's two linear layers, and the adapters of this linear layer."""

    weight: Parameter
    adapters: Sequence[LowRankAdapter]

    @property
    def parameters(self) -> list[Parameter]:
        """Return the weight of the linear layer and the parameters of its adapters."""
        return [self.weight, *(each for pair in self.adapters for each in (pair.a, pair.b))]

    @property
    def keeps_input(self) -> bool:
        """Return True if the gradient of a parameter needs the input of the linear."""
        return self.weight.requires_grad or len(self.adapters) > 0


class ExpertLinears(NamedTuple):
    """An expert's two linears."""

    up: ExpertLinear
    down: ExpertLinear


@dataclass(frozen=True)
class MixturePass:
    """One forward pass of a mixture, with the objects that the backward needs. `experts` has the
    linears of this rank's experts; the experts of the layer are divided among the ranks of `dealt`.
    The ranks of `context` have the other positions of the same sequences. `factors` maps the name
    of each router loss to the factor by which its gradient is multiplied; it is empty if no
    gradient is computed. In the shapes below, T is the number of tokens, k is the number of experts
    of a token, and E is the number of experts of the layer."""

    router: Router
    experts: Sequence[ExpertLinears]
    dealt: ExpertAxis
    routing: Routing
    tokens: TensorTokens
    context: Communicator
    kernels: Kernels
    function: ActivationFunction
    factors: Mapping[str, float]

    @property
    def parameters(self) -> list[Parameter]:
        """Return the parameters of the router and of all experts, which are passed to autograd."""
        linears = [linear for expert in self.experts for linear in expert]
        return [self.router.weight, *(each for linear in linears for each in linear.parameters)]

    @property
    def keeps_rows(self) -> bool:
        """Return True if the gradient of an expert's parameter needs the expert's input. The result
        is the same for all experts, because they all have the same kinds of parameters."""
        return self.experts[0].up.keeps_input

    @property
    def keeps_input(self) -> bool:
        """Return True if the gradient of a parameter needs the input of the mixture. If experts are
        divided among ranks, the gradients of experts need the rows that this rank has received, and
        not the input."""
        return self.router.weight.requires_grad or (self.dealt.size == 1 and self.keeps_rows)

    def linear(self, of_expert: ExpertLinear) -> LinearPass:
        """Return the arguments for computing one of an expert's two linear layers. The adapters of
        experts have no dropout."""
        return LinearPass(
            weight=of_expert.weight,
            bias=None,
            axis=self.tokens.axis,
            kernels=self.kernels,
            adapters=of_expert.adapters,
        )

    def dispatch(self, chosen: Tensor, counts: RowCounts | None = None) -> Dispatch:
        """Return the object that sends the rows of T tokens to their k `chosen` experts [T, k] and
        back; see `ExpertAxis.dispatch`."""
        return self.dealt.dispatch(chosen, self.routing.model.experts, counts)

    def logits(self, rows: Tensor) -> Tensor:
        """Return the outputs [T, E] of the router for the activations `rows` [T, hidden] of T
        tokens. There is one output for each of the E experts, in float32 or a wider type."""
        return self.kernels.linear(widened(rows), widened(self.router.weight))

    def forward(self, rows: Tensor, weights: Tensor, held: Sequence[Segment]) -> "Computed":
        """Compute this rank's experts for the activations `rows` [T, hidden] of T tokens. `weights`
        [T, k] has the weights of each token's k experts. `held` has the tokens of each expert. The
        result has the weighted sum of the experts' outputs."""
        total = torch.zeros_like(rows)
        weights = weights.flatten().unsqueeze(-1)
        kept = list[ExpertTensors]()
        for expert, at, pairs in held:
            up, down = map(self.linear, self.experts[expert])
            x = rows[at]
            y = self.kernels.linear(x, up.weight)
            of_up = up.add_adapters(y, x)
            inner, here = y.new_empty(len(y), down.weight.shape[1]), weights[pairs]
            form = self.function.form(y, self.kernels)
            for part in _few_rows(y, inner, form):
                activated = self.function.of(y[part], self.kernels, form)
                torch.mul(activated, here[part], out=inner[part])
            result = self.kernels.linear(inner, down.weight)
            of_down = down.add_adapters(result, inner)
            # an expert gets each row at most once, so each `index_add_` adds at most one value to a
            # row of `total`
            total.index_add_(0, at, result)
            kept.append(ExpertTensors(y, of_up, of_down))
        return Computed(total, kept)

    def kept_of(self, saved: Sequence[Tensor]) -> list["ExpertTensors"]:
        """Return the tensors that `forward` has kept for each segment (the tokens of one expert).
        `saved` is the flat list of these tensors, as autograd has saved them."""
        first, second = (len(linear.adapters) for linear in self.experts[0])
        each = 1 + first + second
        return [
            ExpertTensors(
                saved[at], saved[at + 1 : at + 1 + first], saved[at + each - second : at + each]
            )
            for at in range(0, len(saved), each)
        ]

    def backward(
        self,
        rows: Tensor | None,
        dy: Tensor,
        weights: Tensor,
        *,
        held: Sequence[Segment],
        kept: Sequence["ExpertTensors"],
    ) -> "Gradients":
        """Compute the backward of this rank's experts, given the input `rows` and the gradient `dy`
        of the output, each [T, hidden]. `rows` is None if no gradient of an expert's parameter
        needs the input. `held` has the tokens of each expert, and `kept` has the tensors that the
        forward has kept for each expert. Add the gradients of the experts' parameters to
        `main_grad`. Return the gradients of the input and of the tokens' `weights` [T, k]."""
        total = torch.zeros_like(dy)
        flat = weights.flatten().unsqueeze(-1)
        by_weight = torch.zeros_like(flat)
        alone = self.dealt.by_source
        for (expert, at, pairs), (y, of_up, of_down) in zip(held, kept, strict=True):
            up, down = map(self.linear, self.experts[expert])
            dy_rows = dy[at]
            ups = [adapter.up(dy_rows) for adapter in down.adapters]
            by_inner = down.input_gradient(dy_rows, ups)
            by_up, inner, here = torch.empty_like(y), torch.empty_like(by_inner), flat[pairs]
            by_here, form = torch.empty_like(here), self.function.form(y, self.kernels)
            for part in _few_rows(y, inner, form):
                again, by_part = self.function.again(y[part], self.kernels, form), by_inner[part]
                products = widened(by_part) * again.result
                torch.sum(products, -1, keepdim=True, out=by_here[part])
                torch.mul(again.result, here[part], out=inner[part])
                again.write_gradient(by_up[part], by_part.mul_(here[part]))
            by_weight[pairs] = by_here
            if self.experts[expert].down.keeps_input:
                down.accumulate(_given(inner), _given(dy_rows), of_down, ups, alone=alone)
            ups = [adapter.up(by_up) for adapter in up.adapters]
            if rows is not None:
                up.accumulate(_given(rows[at]), _given(by_up), of_up, ups, alone=alone)
            total.index_add_(0, at, up.input_gradient(by_up, ups))
        return Gradients(total, by_weight.view_as(weights))

    def loads(self, chosen: Tensor, sequences: int) -> SequenceLoads | None:
        """Return the number of tokens that each whole sequence routes to each expert. `chosen` [T,
        k] has the k experts of each token of this rank. The numbers of all ranks that have parts of
        the same sequences are added. Return None if no loss with a gradient needs these numbers."""
        if not self.factors or self.routing.model.balance != "sequence":
            return None
        loads = self.tokens.loads(chosen, self.routing.model.experts, sequences)
        return loads.summed(self.context)

    def losses(self, logits: Tensor, loads: SequenceLoads | None) -> dict[str, Tensor]:
        """Return the router's losses by name, each summed over this rank's tokens. `logits` [T, E]
        are the router's outputs."""
        return self.routing.losses(logits, loads, self.router.balance)

    def trained(self, logits: Tensor, loads: SequenceLoads | None) -> list[Tensor]:
        """Return the router's losses, multiplied by their factors. Gradients are summed over the
        tensor ranks. If all tensor ranks route the same tokens, they have the same losses. Each
        loss must count once, so all tensor ranks except the first then return an empty list."""
        if not self.factors or not self.tokens.first:
            return []
        losses = self.losses(logits, loads)
        return [self.factors[name] * loss for name, loss in losses.items()]

    def route_back(self, rows: Tensor | None, by_logits: Tensor) -> Tensor:
        """Compute the backward of the router, given the gradient `by_logits` of the router's
        outputs [T, E]. Add the gradient of the router's weight to `main_grad`, unless the weight is
        frozen. Return the gradient of the router's input [T, hidden], in the type of the router's
        weight."""
        weight = self.router.weight
        if weight.requires_grad:
            assert rows is not None, "the forward has kept the input of the router"
            wide = widened(rows)
            weight.accumulate(lambda sum_: self.kernels.add_weight_gradient(sum_, by_logits, wide))
        return self.kernels.input_gradient(by_logits, widened(weight)).to(weight.dtype)


def _few_rows(y: Tensor, inner: Tensor, form: GeluForm) -> Iterator[slice]:
    """Yield slices of the rows of y [n, width] and of their activations `inner` [n, w]. On a CPU a
    slice has about AT_ONCE elements of y, or the rows of a chunk if GELU is computed by a sigmoid.
    They stay in the caches of a core while several operations compute them one after the other. On
    other devices one slice has all rows.

    The results have the bits of one slice with all rows. On a CPU the last elements of a tensor can
    have other bits if they do not fill a vector register. For PyTorch's operations a slice
    therefore has a multiple of VECTORS elements. The other implementation computes all rows in
    the same chunks."""
    step = len(y)
    if y.device.type == "cpu" and form == "sigmoid":
        step = chunk_rows(inner.shape[1])
    elif y.device.type == "cpu":
        whole = VECTORS // math.gcd(VECTORS, inner.shape[1])
        step = max(1, AT_ONCE // y.shape[1] // whole) * whole
    for first in range(0, len(y), step):
        yield slice(first, first + step)


def _given(tensor: Tensor) -> Callable[[], Tensor]:
    """Return a function that returns `tensor`."""
    return lambda: tensor


class ExpertTensors(NamedTuple):
    """The tensors of a segment (tokens of one expert) that the backward needs: the output of the
    expert's first linear, and the inner activations of the adapters of its two linears."""

    up: Tensor
    of_up: Sequence[Tensor]
    of_down: Sequence[Tensor]


class Computed(NamedTuple):
    """The result of `MixturePass.forward`: the weighted sum of the experts' outputs [tokens,
    hidden], and, for each segment (the tokens of one expert), the tensors that the backward
    needs."""

    total: Tensor
    kept: list[ExpertTensors]


class Gradients(NamedTuple):
    """The gradients of the loss with respect to the input of the experts [tokens, hidden] and to
    the weights of each token's experts [tokens, experts of a token]."""

    rows: Tensor
    weights: Tensor


class _Mixture(Function):
    """The full computation of a mixture: gather the input, choose the experts of each token,
    compute the experts, and sum their outputs. For the backward, the function saves the router's
    outputs, the choice of experts, and the outputs of the experts' first linears. It also saves the
    input at this rank's positions if the gradient of a parameter needs it."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, layer: MixturePass, chosen: Chosen, *parameters: Parameter
    ) -> Tensor:
        own = layer.tokens.taken(x)
        rows = own.flatten(0, 1)
        logits = layer.logits(rows)
        scores = layer.routing.scores(logits)
        if chosen.indices is None:
            chosen.indices = layer.routing.choose(scores, layer.router.balance)
        ctx.loads = layer.loads(chosen.indices, x.shape[1])
        if layer.factors and not chosen.losses:
            chosen.losses = layer.losses(logits, ctx.loads)
        dispatch = layer.dispatch(chosen.indices)
        weights = dispatch.pairs(layer.routing.weights(scores, chosen.indices))
        rows = dispatch.rows(rows)
        computed = layer.forward(rows, weights, dispatch.held)
        ctx.layer = layer
        # Save the rows that were received from other ranks, because `x` has only this rank's own
        # rows. Do not save the dispatch itself: full recomputation frees only tensors that autograd
        # has saved, so the tensors of the dispatch would stay in memory. The backward makes the
        # dispatch again from the stored counts of rows.
        ctx.counts = dispatch.counts
        arrived: tuple[Tensor | None, ...] = ()
        if ctx.counts is not None:
            arrived = (rows if layer.keeps_rows else None, weights)
        kept_x = x if layer.keeps_input else None
        kept = [tensor for up, *more in computed.kept for tensor in (up, *itertools.chain(*more))]
        ctx.save_for_backward(kept_x, logits, chosen.indices, *arrived, *kept)
        return layer.tokens.combined(dispatch.summed(computed.total).view_as(own))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        layer: MixturePass = ctx.layer
        x, logits, chosen, *kept = ctx.saved_tensors
        tokens, routing = layer.tokens, layer.routing
        nothing = [None] * (len(ctx.needs_input_grad) - 1)
        dy = tokens.taken(dy)
        rows = None if x is None else tokens.taken(x.detach()).flatten(0, 1)
        with torch.enable_grad():
            leaf = logits.detach().requires_grad_()
            weights = routing.weights(routing.scores(leaf), chosen)
            trained = layer.trained(leaf, ctx.loads)
        dispatch = layer.dispatch(chosen, ctx.counts)
        computed, arrived = rows if layer.keeps_rows else None, weights.detach()
        if ctx.counts is not None:
            computed, arrived, *kept = kept
        gradients = layer.backward(
            computed,
            dispatch.rows(dy.flatten(0, 1)),
            arrived,
            held=dispatch.held,
            kept=layer.kept_of(kept),
        )
        if not (ctx.needs_input_grad[0] or layer.router.weight.requires_grad):
            return None, *nothing  # neither the router nor the input needs a gradient
        by_weights = dispatch.pairs_back(gradients.weights)
        sums = [(weights, by_weights), *((loss, torch.ones_like(loss)) for loss in trained)]
        outputs, by_outputs = zip(*sums, strict=True)
        (by_logits,) = torch.autograd.grad(outputs, leaf, by_outputs)
        dx = dispatch.summed(gradients.rows).add_(layer.route_back(rows, by_logits))
        return tokens.combined(dx.view_as(dy)), *nothing


class Mixture(Computing):
    """A mixture of experts, which takes the place of an MLP: [s, b, hidden] -> [s, b, hidden]. Each
    rank of the expert axis `dealt` has some of the experts. The ranks of `context` have the other
    positions of the same sequences."""

    def __init__(
        self,
        row: MixExperts,
        routing: Routing,
        axis: TensorAxis,
        dealt: ExpertAxis,
        *,
        context: Communicator,
    ) -> None:
        super().__init__()
        self.context = context
        self.dealt = dealt
        self.routing = routing
        self.tokens = TensorTokens(axis, dealt.whole)
        self.function = ActivationFunction(row.function, len(row.up.outputs) == 2)
        self.linears: list[ExpertLinears] = []
        # the number of tokens of each expert in the training microbatches of this step so far
        self.counts = torch.zeros(row.count, dtype=torch.int64)
        # the router's losses, summed over the training microbatches of this step so far
        self.losses: dict[str, Tensor] = {}
        for number in dealt.own(row.count):
            expert = Expert(row, axis, dealt)
            self.add_module(str(number), expert)
            linears = (
                ExpertLinear(each.weight, each.adapters) for each in (expert.up, expert.down)
            )
            self.linears.append(ExpertLinears(*linears))

    def forward(
        self,
        x: Tensor,
        router: Router,
        chosen: Chosen | None = None,
        factors: Mapping[str, float] | None = None,
    ) -> Tensor:
        """Return the weighted sum of the experts' outputs; under sequence parallelism, only at this
        rank's positions. If `chosen` already contains a choice of experts, this choice is used
        again; otherwise the new choice is stored in `chosen`. Pass None for `chosen` if the choice
        is not needed again. `factors` maps the name of each router loss to the factor by which its
        gradient is multiplied."""
        layer = MixturePass(
            router=router,
            experts=self.linears,
            dealt=self.dealt,
            routing=self.routing,
            tokens=self.tokens,
            context=self.context,
            kernels=self.kernels,
            function=self.function,
            factors=factors or {},
        )
        chosen = chosen or Chosen()
        is_new = chosen.indices is None  # a recomputation must not count the tokens again
        y: Tensor = _Mixture.apply(x, layer, chosen, *layer.parameters)
        if is_new and torch.is_grad_enabled():
            assert chosen.indices is not None, "the forward has stored the choice"
            counts = chosen.indices.flatten().bincount(minlength=len(self.counts))
            self.counts = self.counts.to(counts.device) + counts
            for name, loss in chosen.losses.items():
                self.losses[name] = loss.double() + self.losses.get(name, 0.0)
        return y

    def begin_step(self) -> None:
        """Set the numbers of tokens of the experts, and the router's losses, to zero at the start
        of a step."""
        self.counts = torch.zeros_like(self.counts)
        self.losses = {}


def widened(x: Tensor) -> Tensor:
    """Return `x` converted to float32, or `x` itself if its type is float32 or wider."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
