"""The boundary between two pipeline stages: the form in which an activation is sent, and the input
and output ends of the autograd graph that a stage builds for a microbatch."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.graph import GradientEdge, get_gradient_edge

from ptdmpi.model.tensor_parallel import TensorAxis


class Boundary:
    """The form in which an activation [s, b, h], or its gradient, is sent between two stages.

    If `scatter_gather` is True, each of the t ranks of a tensor group sends 1/t of the activation,
    and the receivers gather the parts (Narayanan et al. 2021, section 4.1). This is possible
    because all ranks of the tensor group have the same activation. Under sequence parallelism the
    activation is already divided among the tensor ranks, so this option has no effect.
    """

    def __init__(self, shape: tuple[int, ...], axis: TensorAxis, scatter_gather: bool) -> None:
        self.axis = axis
        if axis.divides_sequence:
            shape = (shape[0] // axis.size, *shape[1:])
        elements = torch.Size(shape).numel()
        self.shape = shape
        self.scattered = scatter_gather and axis.size > 1 and not axis.divides_sequence
        # the t parts must have the same length; if t does not divide the number of elements, each
        # rank sends the whole activation
        self.scattered = self.scattered and elements % axis.size == 0
        self.wire_elements = elements // axis.size if self.scattered else elements

    def pack(self, x: Tensor) -> Tensor:
        """Return the part of the activation `x` [s, b, h] that this rank sends, as a flat
        contiguous tensor."""
        # Only values are sent, without an autograd graph. The next stage builds a separate graph,
        # and its backward op sends the gradient back.
        return self.axis.share(x) if self.scattered else x.detach().contiguous().view(-1)

    def unpack(self, received: Tensor) -> Tensor:
        """Return the activation [s, b, h] for the flat tensor that this rank has received. If the
        activation is sent in t parts, gather the parts of all tensor ranks first."""
        if self.scattered:
            received = self.axis.from_shares(received)
        return received.view(self.shape)


class Arrival:
    """The input end of a stage's autograd graph. It stores the gradient of the input, but keeps no
    reference to the input's values."""

    gradient: Tensor | None = None

    def begin(self, x: Tensor) -> Tensor:
        """Return the input `x` as a non-leaf tensor of the stage's own autograd graph. If `x` were
        a leaf, the graph would refer to `x` and keep all of `x` in memory until its gradient is
        computed. The first layer's backward may need only a part of `x`."""
        arrived: Tensor = _Arrive.apply(x.new_empty(0, requires_grad=True), x, self)
        return arrived


class _Arrive(Function):
    """The identity function, whose backward stores the gradient in an `Arrival`."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, x: Tensor, arrival: Arrival) -> Tensor:
        ctx.arrival = arrival
        return x.detach()

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[None, None, None]:
        ctx.arrival.gradient = dx
        return None, None, None


class Departure:
    """The output end of a stage's autograd graph. It keeps no reference to the output's values, so
    their memory can be freed once the values have been sent."""

    gradient: Tensor | None = None

    def __init__(self, y: Tensor) -> None:
        self._end: GradientEdge | None = get_gradient_edge(_Depart.apply(y, self))

    def backward(self, dy: Tensor | None) -> None:
        """Run the backward of the graph, beginning with the output's gradient `dy`. If `dy` were an
        argument of torch.autograd.backward, torch would import SymPy to compare two shapes. This
        import would take a second at the start of every rank. `_Depart` therefore reads `dy` from
        this object."""
        assert self._end is not None, "the backward of a graph runs only once"
        # Remove the reference to the graph. The graph also refers to this object, so both would
        # otherwise stay in memory until Python's garbage collector finds the cycle.
        end = self._end
        self._end = None
        self.gradient = dy
        torch.autograd.backward(end)


class _Depart(Function):
    """An autograd Function that ends the graph. Its output is a scalar with an arbitrary value,
    which is not used. Its backward reads the gradient from a `Departure`."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, departure: Departure) -> Tensor:
        ctx.departure = departure
        return y.new_empty(())

    @staticmethod
    def backward(ctx: Any, nothing: Tensor) -> tuple[Tensor | None, None]:
        dy = ctx.departure.gradient
        ctx.departure.gradient = None
        return dy, None
