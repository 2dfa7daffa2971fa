"""What passes between stages: the form of an activation on the wire, and the two ends of the graph
that a stage makes of a microbatch."""

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


class Arrival:
    """A stage's input as its graph has it: nothing of the input, and in the end its gradient."""

    gradient: Tensor | None = None

    def begin(self, x: Tensor) -> Tensor:
        """The input as a value of the stage's own graph. As a leaf it would stay until its gradient
        is there, and so in vain where a first layer keeps but a share of it."""
        arrived: Tensor = _Arrive.apply(x.new_empty(0, requires_grad=True), x, self)
        return arrived


class _Arrive(Function):
    @staticmethod
    def forward(ctx: Any, leaf: Tensor, x: Tensor, arrival: Arrival) -> Tensor:
        ctx.arrival = arrival
        return x.detach()

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[None, None, None]:
        ctx.arrival.gradient = dx
        return None, None, None


class Departure:
    """A stage's output as its graph has it: nothing of the output, which can go once it has been
    passed on."""

    gradient: Tensor | None = None

    def __init__(self, y: Tensor) -> None:
        self._end: GradientEdge | None = get_gradient_edge(_Depart.apply(y, self))

    def backward(self, dy: Tensor | None) -> None:
        """Run the graph back from the output's gradient. As an argument of torch's own call it
        would have SymPy imported, to compare two shapes: a second of every rank's start."""
        assert self._end is not None, "a graph runs back once"
        # the graph knows this object: knowing it in turn would keep both until someone collects
        end = self._end
        self._end = None
        self.gradient = dy
        torch.autograd.backward(end)


class _Depart(Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, departure: Departure) -> Tensor:
        ctx.departure = departure
        return y.new_empty(())

    @staticmethod
    def backward(ctx: Any, one: Tensor) -> tuple[Tensor | None, None]:
        dy = ctx.departure.gradient
        ctx.departure.gradient = None
        return dy, None
