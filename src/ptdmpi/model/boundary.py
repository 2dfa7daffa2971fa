"""The boundary between two stages. It defines the form in which an activation is sent, and the
input and the output end of the autograd graph that a stage builds for a microbatch."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.graph import GradientEdge, get_gradient_edge

from ptdmpi.model.tensor_parallel import TensorAxis


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
        # all shares have one length: a tensor that t does not divide is sent whole
        self.scattered = self.scattered and elements % axis.size == 0
        self.wire_elements = elements // axis.size if self.scattered else elements

    def pack(self, x: Tensor) -> Tensor:
        """Return the part of `x` that this rank sends: flat and contiguous."""
        # only values are sent: the next stage builds its own graph, and its B returns the gradient
        return self.axis.share(x) if self.scattered else x.detach().contiguous().view(-1)

    def unpack(self, received: Tensor) -> Tensor:
        """Return the activation [s, b, h] from the received tensor."""
        if self.scattered:
            received = self.axis.from_shares(received)
        return received.view(self.shape)


class Arrival:
    """The input end of a stage's graph. It keeps no reference to the input, and receives its
    gradient."""

    gradient: Tensor | None = None

    def begin(self, x: Tensor) -> Tensor:
        """Return the input as a non-leaf value of the stage's own graph. A leaf would stay in
        memory until its gradient is there, although a first layer may keep only a share of it."""
        arrived: Tensor = _Arrive.apply(x.new_empty(0, requires_grad=True), x, self)
        return arrived


class _Arrive(Function):
    """The identity, whose backward hands the gradient to an `Arrival`."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, x: Tensor, arrival: Arrival) -> Tensor:
        ctx.arrival = arrival
        return x.detach()

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[None, None, None]:
        ctx.arrival.gradient = dx
        return None, None, None


class Departure:
    """The output end of a stage's graph. It keeps no reference to the output, whose memory can be
    freed once it has been sent."""

    gradient: Tensor | None = None

    def __init__(self, y: Tensor) -> None:
        self._end: GradientEdge | None = get_gradient_edge(_Depart.apply(y, self))

    def backward(self, dy: Tensor | None) -> None:
        """Run the graph backward from the output's gradient `dy`. Passed as an argument of torch's
        own call, `dy` would make torch import SymPy to compare two shapes, which costs a second at
        every rank's start."""
        assert self._end is not None, "a graph runs back once"
        # the graph refers to this object: a reference back would keep both until garbage collection
        end = self._end
        self._end = None
        self.gradient = dy
        torch.autograd.backward(end)


class _Depart(Function):
    """An end of the graph without values, whose backward takes the gradient from a `Departure`."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, departure: Departure) -> Tensor:
        ctx.departure = departure
        return y.new_empty(())

    @staticmethod
    def backward(ctx: Any, nothing: Tensor) -> tuple[Tensor | None, None]:
        dy = ctx.departure.gradient
        ctx.departure.gradient = None
        return dy, None
