"""The tokens that one tensor rank processes in a mixture of experts: how they are selected from the
input, and how their results are combined into the output.

If the tensor axis divides each expert, every tensor rank processes all tokens. The rank has a part
of the width of each expert, and the outputs are sums over the tensor ranks.

If experts are whole, the rank that has an expert has the full width of the expert. Each of the t
tensor ranks routes 1/t of the tokens of its context rank. Under sequence parallelism a rank already
has only its own positions. Otherwise all tensor ranks have the same activations, and tensor rank r
takes the r-th block of positions. A token is sent to its experts and back, so its output is
complete on the rank that has routed it. Without sequence parallelism the outputs of all tensor
ranks are then gathered.

In the backward, gradients are sent to the experts and back in the same way. The gradient of the
output at a position is complete on every rank that has the position, so each rank sends the experts
the gradient at its own positions. Each rank then receives the complete gradient of the input at its
own positions. These gradients are gathered if every rank needs all positions. With whole experts,
no activation and no gradient of an activation is therefore summed over the tensor axis. The
gradients of the router and of the experts are sums over tokens, so at the end of the step they are
added over all ranks that have the same parameters.
"""

from dataclasses import dataclass

from torch import Tensor

from ptdmpi.model.experts.routing import SequenceLoads
from ptdmpi.model.tensor_parallel import TensorAxis


@dataclass(frozen=True)
class TensorTokens:
    """The division of a mixture's tokens over the tensor ranks of `axis`. If `whole` is True, each
    tensor rank routes its own tokens to experts that the tensor axis does not divide."""

    axis: TensorAxis
    whole: bool

    @property
    def apart(self) -> bool:
        """Return True if tensor ranks route different tokens."""
        return self.whole and self.axis.size > 1

    @property
    def first(self) -> bool:
        """Return True if this rank counts the losses of its tokens. If several tensor ranks route
        the same tokens, only the first of these ranks counts the losses."""
        return self.apart or self.axis.rank == 0

    def taken(self, x: Tensor) -> Tensor:
        """Return the activations [s, b, hidden] that this rank routes. `x` are the activations that
        the rank has outside attention and MLP."""
        if not self.apart:
            return self.axis.gather(x)
        if self.axis.divides_sequence:
            return x
        return self.own_positions(x)

    def own_positions(self, x: Tensor) -> Tensor:
        """Return the part of `x` at the positions that this rank routes. `x` has all positions of
        the tensor ranks in its first dim."""
        return x.chunk(self.axis.size)[self.axis.rank] if self.apart else x

    def combined(self, y: Tensor) -> Tensor:
        """Return the outputs at the positions that this rank has outside attention and MLP. `y` are
        the experts' outputs for the tokens that this rank routes."""
        if not self.apart:
            return self.axis.reduce(y)
        if self.axis.divides_sequence:
            return y
        return self.axis.comm.all_gather(y.contiguous())

    def loads(self, chosen: Tensor, experts: int, sequences: int) -> SequenceLoads:
        """Return the loads of `experts` experts: the number of tokens that each sequence routes to
        each expert. `chosen` [T, k] has the k experts of each of this rank's T tokens. If tensor
        ranks route different tokens of the same sequences, the counts of all tensor ranks are
        added."""
        loads = SequenceLoads.of(chosen, experts, sequences)
        return loads.summed(self.axis.comm) if self.apart else loads
