"""Linear layers whose weights are divided over the tensor axis, and the collectives of this axis
(Shoeybi et al. 2019, arXiv 1909.08053, section 3).

Activations are [s, b, h], for b sequences of s positions and the hidden size h. The sequence dim
comes first, so that the sequence-parallel collectives work on contiguous memory. Two operators
communicate: the conjugate operators f and g of the paper's Figure 3:

    f   forward: nothing             backward: all-reduce
    g   forward: all-reduce          backward: nothing

A block is attention or an MLP. With sequence parallelism, activations between blocks are divided
along s, and other operators are used (Korthikanti et al. 2022, arXiv 2205.05198, section 4.2.2; in
that paper, g is another operator than in Shoeybi et al.):

    g   forward: all-gather          backward: reduce-scatter      (replaces f)
    g'  forward: reduce-scatter      backward: all-gather          (replaces g)

Weight gradients are added to the parameter's float32 `main_grad` when they are computed, or in the
second part of a split backward (`Parameter.accumulate`). In the shapes below, i and o are the
numbers of inputs and outputs of a linear, and t is the number of tensor ranks.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor
from torch.autograd import Function

from ptdmpi.comm.communicator import DONE, Communicator, Handle
from ptdmpi.config.precision import Scaling
from ptdmpi.model.adapters.low_rank import LowRankAdapter
from ptdmpi.model.adapters.scales import ScaleAdapter, rescaled
from ptdmpi.model.kernels import Computing, Kernels
from ptdmpi.model.kernels.delayed import DelayedKernels
from ptdmpi.model.kernels.float8 import Float8Kernels
from ptdmpi.model.kernels.wide import sum_of_rows
from ptdmpi.model.low_bit.delayed import DelayedScales
from ptdmpi.model.parameters import Parameter, Split, declare
from ptdmpi.model.random import RandomStream
from ptdmpi.model.sequence.positions import ALL, Positions


@dataclass(frozen=True)
class TensorAxis:
    """The communicator of the tensor axis. `sequence_parallel` is True if activations outside
    attention and MLP are divided along the sequence."""

    comm: Communicator
    sequence_parallel: bool = False

    @property
    def size(self) -> int:
        """Return the number of ranks of the axis."""
        return self.comm.size

    @property
    def rank(self) -> int:
        """Return this rank's number on the axis."""
        return self.comm.rank

    @property
    def divides_sequence(self) -> bool:
        """Return True if each rank has different positions outside attention and MLP (sequence
        parallelism)."""
        return self.sequence_parallel and self.size > 1

    def gather(self, x: Tensor) -> Tensor:
        """Return the input of a block (attention or MLP), which has all positions on every rank.
        `x` has the positions of this rank outside the block."""
        if not self.divides_sequence:
            return x
        whole, arrived = self.gather_begin(x)
        arrived.wait()
        return whole

    def gather_begin(self, x: Tensor) -> tuple[Tensor, Handle]:
        """Begin `gather`. The returned tensor is complete after `wait` of the returned handle."""
        if not self.divides_sequence:
            return x, DONE
        return self.comm.all_gather_begin(x.contiguous())

    def reduce(self, partial: Tensor) -> Tensor:
        """Return the output of a block (attention or MLP), which is the sum of the ranks' partial
        outputs. Under sequence parallelism, return this rank's positions of the sum."""
        total, summed = self.reduce_begin(partial)
        summed.wait()
        return total

    def reduce_begin(self, partial: Tensor) -> tuple[Tensor, Handle]:
        """Begin `reduce`. The returned tensor is complete after `wait` of the returned handle."""
        if self.size == 1:
            return partial, DONE
        partial = partial.contiguous()
        if self.divides_sequence:
            return self.comm.reduce_scatter_begin(partial)
        return partial, self.comm.all_reduce_begin(partial)

    def share(self, x: Tensor) -> Tensor:
        """Return this rank's share of `x`, as a flat view of 1/t of its elements. All ranks must
        have the same `x`, and t must divide the number of its elements."""
        flat = x.detach().contiguous().view(-1)
        elements = len(flat) // self.size
        return flat.narrow(0, self.rank * elements, elements)

    def from_shares(self, share: Tensor) -> Tensor:
        """Gather the shares of all ranks (see `share`), and return one flat tensor that has all
        shares."""
        return self.comm.all_gather(share)

    def between_blocks(self, positions: Positions = ALL) -> Positions:
        """Return the positions whose activations this rank has between blocks (attention and MLP).
        Under sequence parallelism they are this tensor rank's equal share of `positions`; otherwise
        they are all `positions`."""
        return positions.shared(self.rank, self.size) if self.divides_sequence else positions


def accumulate_bias_gradient(
    bias: Parameter | None, dy: Tensor, own: Callable[[Tensor], Tensor] | None = None
) -> None:
    """Add the gradient of a bias, which is the sum of `dy` over all positions, to its `main_grad`.
    Do nothing if there is no bias, or if the bias does not train. If only some elements of the bias
    were added to the output, `own` is a function that selects these elements."""
    if bias is not None and bias.requires_grad:
        # sum in the type of `main_grad`, because a sum over all positions in a 16-bit type loses
        # small terms
        summed = sum_of_rows(dy.flatten(0, -2), bias.main_grad.dtype)
        bias.accumulate(lambda total: (total if own is None else own(total)).add_(summed))


class Gathered:
    """An activation at all positions, which is gathered from this rank's positions when a gradient
    needs it. The function `x` returns the activation at this rank's positions, without an autograd
    graph, because a graph would stay in memory. If `early` is True, the gather begins immediately,
    otherwise at the first call of the object. In a split backward the first call is in the second
    part."""

    def __init__(self, axis: TensorAxis, x: Callable[[], Tensor], early: bool = False) -> None:
        self._axis = axis
        self._x = x
        self._begun: tuple[Tensor, Handle] | None = None
        self._whole: Tensor | None = None
        if early:
            self._begun = axis.gather_begin(x())

    def __call__(self) -> Tensor:
        """Return the activation at all positions. Begin the gather if it has not begun, and wait
        until it is complete."""
        if self._whole is None:
            self._whole, arrived = self._begun or self._axis.gather_begin(self._x())
            self._begun = None
            arrived.wait()
        return self._whole


@dataclass
class LinearPass:
    """One forward pass of a linear, with the objects that the backward needs: the parameters, the
    tensor axis, the kernels, the adapters that are added to the product, and the random stream for
    the adapters' dropout."""

    weight: Parameter
    bias: Parameter | None
    axis: TensorAxis
    kernels: Kernels
    adapters: Sequence[LowRankAdapter] = ()
    stream: RandomStream | None = None

    def tracked(self, x: Tensor) -> list[Parameter | None]:
        """Return the parameters that must be passed to autograd so that it calls the backward of
        the pass. If the input `x` has a gradient, there are none, because autograd then calls the
        backward without them, and does not visit each parameter."""
        return [] if x.requires_grad else self.parameters

    @property
    def parameters(self) -> list[Parameter | None]:
        """Return all parameters of the pass."""
        parameters: list[Parameter | None] = [self.weight, self.bias]
        for adapter in self.adapters:
            parameters += (adapter.a, adapter.b)
        return parameters

    def own(self, rows: Tensor) -> Tensor:
        """Return the rows of a weight, or of its gradient, that belong to the outputs of the pass.
        This class returns all rows; a subclass may compute only some outputs."""
        return rows

    @property
    def needs_input(self) -> bool:
        """Return True if the gradient of a parameter needs the input."""
        return self.weight.requires_grad or bool(self.adapters)

    def keep(self, ctx: Any, kept: Sequence[Tensor], downs: Sequence[Tensor]) -> None:
        """Save two kinds of tensors for the backward: the tensors `kept` of the input, if a
        gradient needs the input, and the inner activations `downs` of the adapters."""
        kept = kept if self.needs_input else ()
        ctx.save_for_backward(*kept, *downs)
        ctx.layer = self
        ctx.kept = len(kept)

    def add_adapters(self, y: Tensor, x: Tensor) -> list[Tensor]:
        """Add the adapters' products with x [s, b, i] to y [s, b, o], in place. Return the inner
        activation [s, b, rank of the adapter] of each adapter."""
        return [adapter.add_to(y, x, self.stream) for adapter in self.adapters]

    def input_gradient(self, dy: Tensor, ups: Sequence[Tensor]) -> Tensor:
        """Return the gradient [s, b, i] of the input, including the adapters' contributions, for
        the gradient `dy` of the output. `ups` has the gradient of each adapter's inner activation,
        [s, b, rank of the adapter]."""
        dx = self.kernels.input_gradient(dy, self.own(self.weight))
        for adapter, up in zip(self.adapters, ups, strict=True):
            adapter.add_input_gradient(dx, up, self.stream)
        return dx

    def accumulate(
        self,
        x: Callable[[], Tensor],
        dy: Callable[[], Tensor],
        downs: Sequence[Tensor],
        ups: Sequence[Tensor],
        *,
        alone: bool = False,
    ) -> None:
        """Add this microbatch's gradients of the weight and of the adapters to `main_grad`,
        immediately or in the second part of a split backward. `x` and `dy` are functions that
        return the input and the gradient of the output; they are called when the gradients are
        computed. `downs` are the inner activations of the adapters, and `ups` are their gradients.
        If `alone` is True, the gradients of this microbatch are rounded to the type of `main_grad`
        before they are added (see `Parameter.accumulate`)."""
        kernels = self.kernels
        if self.weight.requires_grad:
            self.weight.accumulate(
                lambda total: kernels.add_weight_gradient(self.own(total), dy(), x()),
                alone=alone,
            )
        for adapter, down, up in zip(self.adapters, downs, ups, strict=True):
            adapter.accumulate((x, dy), down.detach(), up, self.stream, alone=alone)


class ColumnLinear(Function):
    """The function of a column-parallel linear: the operator f, then x W^T + b plus the adapters'
    products. If a gradient needs the input, the forward saves the input only at this rank's
    positions, and the backward gathers all positions again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: LinearPass, *parameters: Parameter | None) -> Tensor:
        x, kept = layer.kernels.entering(x)
        whole = layer.axis.gather(x)
        y = layer.kernels.linear(whole, layer.weight, layer.bias)
        layer.keep(ctx, kept, layer.add_adapters(y, whole))
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        layer: LinearPass = ctx.layer
        axis = layer.axis
        kept, downs = _saved(ctx)
        whole = None
        if kept:
            # Gather x again, because only this rank's positions were saved (Korthikanti et al.
            # 2022, section 4.2.2). If communication makes progress during computation, begin the
            # gather early, so that it overlaps with the computation of the input's gradient.
            # Otherwise an early gather would only use memory for longer.
            early = axis.comm.overlaps and not layer.weight.puts_off
            whole = Gathered(axis, partial(layer.kernels.entered, kept, dy.dtype), early)
        ups = [adapter.up(dy) for adapter in layer.adapters]
        dx = None
        summed = DONE
        if ctx.needs_input_grad[0]:
            # this all-reduce overlaps with the computation of the weights' gradients, which do not
            # need its result
            dx, summed = axis.reduce_begin(layer.input_gradient(dy, ups))
        if whole is not None:
            layer.accumulate(whole, lambda: dy, downs, ups)
        accumulate_bias_gradient(layer.bias, dy)
        summed.wait()
        return dx, *_no_gradients(ctx)


class _RowLinear(Function):
    """The function of a row-parallel linear: the product x W^T plus the adapters' products, then
    the operator g, and finally the addition of the bias b."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: LinearPass, *parameters: Parameter | None) -> Tensor:
        x, kept = layer.kernels.entering(x)
        if layer.axis.size == 1:
            y = layer.kernels.linear(x, layer.weight, layer.bias)
        else:
            y = layer.kernels.linear(x, layer.weight)
        layer.keep(ctx, kept, layer.add_adapters(y, x))
        if layer.axis.size == 1:
            return y
        y = layer.axis.reduce(y)
        if layer.bias is not None:
            # add the bias after the sum over ranks, because otherwise every rank would add it
            # (Shoeybi et al. 2019, section 3)
            y.add_(layer.bias)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        layer: LinearPass = ctx.layer
        axis = layer.axis
        kept, downs = _saved(ctx)
        # add the gradient of the bias to its `main_grad` before dy is gathered: each rank adds the
        # sum over its own positions, and these sums are added over the ranks later
        accumulate_bias_gradient(layer.bias, dy)
        whole = axis.gather(dy)
        ups = [adapter.up(whole) for adapter in layer.adapters]
        if kept:
            x = partial(layer.kernels.entered, kept, dy.dtype)
            if layer.weight.puts_off and axis.divides_sequence:
                # in a split backward, the first part keeps only this rank's positions of dy, and
                # the second part gathers all positions
                layer.accumulate(x, Gathered(axis, lambda: dy), downs, ups)
            else:
                layer.accumulate(x, lambda: whole, downs, ups)
        dx = None
        if ctx.needs_input_grad[0]:
            dx = layer.input_gradient(whole, ups)
        return dx, *_no_gradients(ctx)


def _saved(ctx: Any) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Return the two groups of tensors that `LinearPass.keep` has saved: those of the input, and
    the inner activations of the adapters. If the gradients of weights are deferred, the tensors are
    detached, because otherwise they would keep their autograd graphs in memory."""
    saved = ctx.saved_tensors
    if ctx.layer.weight.puts_off:
        saved = tuple(map(Tensor.detach, saved))
    return saved[: ctx.kept], saved[ctx.kept :]


def _no_gradients(ctx: Any) -> list[None]:
    """Return the gradients of all arguments of an autograd Function except the first: None for
    each. The gradients of parameters are not returned, because they are added to `main_grad`."""
    return [None] * (len(ctx.needs_input_grad) - 1)


def declared_bias(wanted: bool, axis_size: int, outputs: int, **options: Any) -> Parameter | None:
    """Declare the bias of a linear with `outputs` outputs on `axis_size` tensor ranks, and return
    it. Return None if `wanted` is False, because the linear has no bias. `options` are fields of
    `Declaration`."""
    if not wanted:
        return None
    return declare(axis_size, (outputs,), "zeros", **options)


class LayerLinear(Computing):
    """The base class of the linears of a layer, whose weights the tensor axis divides.

    `scaling` determines which elements share a scale, if the products are in 8-bit floating point;
    "none" means that the products have the type of their operands. If `keeps_codes` is True, the
    8-bit codes of the input are kept for the backward instead of the input. `delayed` has the
    scales for the scaling "delayed".
    """

    scaling: Scaling = "none"
    keeps_codes = False
    weight: Parameter
    bias: Parameter | None

    def __init__(self, axis: TensorAxis) -> None:
        super().__init__()
        self.axis = axis
        self.adapters: Sequence[LowRankAdapter] = ()
        self.scales: Sequence[ScaleAdapter] = ()
        self.delayed = DelayedScales()

    def take(self, kernels: Kernels) -> None:
        """Use these kernels from now on, but compute products with this linear's `scaling`."""
        if self.scaling == "block":
            kernels = Float8Kernels(kernels, keeps_codes=self.keeps_codes)
        elif self.scaling == "delayed":
            kernels = DelayedKernels(kernels, self.delayed, keeps_codes=self.keeps_codes)
        super().take(kernels)

    def begun(self, stream: RandomStream | None) -> LinearPass:
        """Return a `LinearPass` for one forward pass of this linear. `stream` is the random stream
        for the adapters' dropout; None without dropout."""
        return LinearPass(
            weight=self.weight,
            bias=self.bias,
            axis=self.axis,
            kernels=self.kernels,
            adapters=self.adapters,
            stream=stream,
        )


class ColumnParallelLinear(LayerLinear):
    """A linear y = x W^T + b in which the rows of W are divided over the tensor axis: [s, b, i] ->
    [s, b, o/t].

    `parts` has the number of outputs of each part, such as query, key and value. Each part is
    divided separately, into at most `most` shares (see `Split`).
    """

    def __init__(
        self,
        axis: TensorAxis,
        inputs: int,
        parts: tuple[int, ...],
        *,
        bias: bool,
        init_std: float,
        most: tuple[int, ...] | None = None,
    ) -> None:
        super().__init__(axis)
        split = Split(0, parts, most)
        self.weight = declare(axis.size, (sum(parts), inputs), init_std, split=split)
        self.bias = declared_bias(bias, axis.size, sum(parts), split=split)

    def forward(
        self, x: Tensor, stream: RandomStream | None = None, *, adds_bias: bool = True
    ) -> Tensor:
        """Return this rank's outputs [s, b, o/t]. `stream` is the random stream for the adapters'
        dropout. If `adds_bias` is False, the outputs are without the bias, and the caller adds it
        and its gradient."""
        layer = self.begun(stream)
        layer.bias = self.bias if adds_bias else None
        return rescaled(ColumnLinear.apply(x, layer, *layer.tracked(x)), self.scales)


class RowParallelLinear(LayerLinear):
    """A linear y = x W^T + b in which the columns of W are divided over the tensor axis: [s, b,
    i/t] -> [s, b, o]."""

    def __init__(
        self, axis: TensorAxis, inputs: int, outputs: int, *, bias: bool, init_std: float
    ) -> None:
        super().__init__(axis)
        self.weight = declare(axis.size, (outputs, inputs), init_std, split=Split(1, (inputs,)))
        self.bias = declared_bias(bias, axis.size, outputs, shared_gradient=True)

    def forward(self, x: Tensor, stream: RandomStream | None = None) -> Tensor:
        """Return the sum [s, b, o] over all tensor ranks' products; under sequence parallelism,
        only at this rank's positions. `stream` is the random stream for the adapters' dropout."""
        layer = self.begun(stream)
        x = rescaled(x, self.scales)
        return _RowLinear.apply(x, layer, *layer.tracked(x))


class _Linear(Function):
    """The function x W^T + b for a weight that every tensor rank has in full."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Parameter, bias: Parameter | None, kernels: Kernels
    ) -> Tensor:
        if weight.requires_grad:
            ctx.save_for_backward(x)
        ctx.layer = (weight, bias, kernels)
        return kernels.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        weight, bias, kernels = ctx.layer
        if weight.requires_grad:
            x = ctx.saved_tensors[0].detach()
            weight.accumulate(lambda total: kernels.add_weight_gradient(total, dy, x))
        accumulate_bias_gradient(bias, dy)
        dx = None
        if ctx.needs_input_grad[0]:
            dx = kernels.input_gradient(dy, weight)
        return dx, *_no_gradients(ctx)


class ReplicatedLinear(Computing):
    """A linear y = x W^T + b that every tensor rank computes completely, for an input x that every
    tensor rank has: [..., i] -> [..., o]."""

    def __init__(self, inputs: int, outputs: int, bias: bool, init_std: float) -> None:
        super().__init__()
        self.weight = declare(1, (outputs, inputs), init_std)
        self.bias = declared_bias(bias, 1, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Return x W^T + b, [..., o]."""
        return _Linear.apply(x, self.weight, self.bias, self.kernels)
