"""The boundary between two pipeline stages. This module defines the form in which an activation is
sent, and the input and the output of the autograd graph that a stage builds for a microbatch."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.graph import GradientEdge, get_gradient_edge

from ptdmpi.model.tensor_parallel import TensorAxis


class Boundary:
    """The form in which an activation [s, b, h], or its gradient, is sent between two stages.

    With `scatter_gather` (Narayanan et al. 2021, section 4.1), the ranks of a tensor group, which
    have equal activations, send 1/t of it each, and the receivers gather it. Under sequence
    parallelism the activation is already divided over the tensor ranks.
    """

    def __init__(self, shape: tuple[int, ...], axis: TensorAxis, scatter_gather: bool) -> None:
        self.axis = axis
        if axis.divides_sequence:
            shape = (shape[0] // axis.size, *shape[1:])
        elements = torch.Size(shape).numel()
        self.shape = shape
        self.scattered = scatter_gather and axis.size > 1 and not axis.divides_sequence
        # a tensor is sent unscattered if t does not divide its length, because all shares must have
        # the same length
        self.scattered = self.scattered and elements % axis.size == 0
        self.wire_elements = elements // axis.size if self.scattered else elements

    def pack(self, x: Tensor) -> Tensor:
        """Return the share of `x` that this rank sends, flat and contiguous."""
        # only values are sent: the next stage builds its own graph, and its backward op (B) returns
        # the gradient
        return self.axis.share(x) if self.scattered else x.detach().contiguous().view(-1)

    def unpack(self, received: Tensor) -> Tensor:
        """Return the activation [s, b, h], given the received tensor."""
        if self.scattered:
            received = self.axis.from_shares(received)
        return received.view(self.shape)


class Arrival:
    """The input of a stage's autograd graph. An `Arrival` keeps no reference to the input's values,
    and stores the gradient of the input."""

    gradient: Tensor | None = None

    def begin(self, x: Tensor) -> Tensor:
        """Return the input as a non-leaf tensor of the stage's own graph. A leaf would stay in
        memory until its gradient exists, although a first layer may need only a share of it."""
        arrived: Tensor = _Arrive.apply(x.new_empty(0, requires_grad=True), x, self)
        return arrived


class _Arrive(Function):
    """The identity. The backward of this function hands the gradient to an `Arrival`."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, x: Tensor, arrival: Arrival) -> Tensor:
        ctx.arrival = arrival
        return x.detach()

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[None, None, None]:
        ctx.arrival.gradient = dx
        return None, None, None


class Departure:
    """The output of a stage's autograd graph. A `Departure` keeps no reference to the output's
    values, whose memory can be freed once they have been sent."""

    gradient: Tensor | None = None

    def __init__(self, y: Tensor) -> None:
        self._end: GradientEdge | None = get_gradient_edge(_Depart.apply(y, self))

    def backward(self, dy: Tensor | None) -> None:
        """Run the backward of the graph from the output's gradient `dy`. If `dy` were an argument
        of torch's own call, torch would import SymPy to compare two shapes, which costs a second at
        the start of every rank."""
        assert self._end is not None, "a graph runs back once"
        # the graph refers to this object: a reference back would keep both until garbage collection
        end = self._end
        self._end = None
        self.gradient = dy
        torch.autograd.backward(end)


class _Depart(Function):
    """An end of the graph without values. The backward of this function takes the gradient from a
    `Departure`."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, departure: Departure) -> Tensor:
        ctx.departure = departure
        return y.new_empty(())

    @staticmethod
    def backward(ctx: Any, nothing: Tensor) -> tuple[Tensor | None, None]:
        dy = ctx.departure.gradient
        ctx.departure.gradient = None
        return dy, None
