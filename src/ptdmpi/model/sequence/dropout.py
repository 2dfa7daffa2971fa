"""Dropout of hidden activations at the positions of a rank."""

from torch import Tensor

from ptdmpi.model.kernels import Computing
from ptdmpi.model.kernels.dropout import drop_hidden
from ptdmpi.model.random import RandomStream
from ptdmpi.model.sequence.positions import Positions
from ptdmpi.model.tensor_parallel import TensorAxis


class HiddenDropout(Computing):
    """Dropout of activations [s, b, h] with the probability `rate`. Under sequence parallelism, the
    activations have only this rank's positions. `place` has the number of the layer and the number
    of the dropout within the layer."""

    def __init__(self, rate: float, place: tuple[int, ...], axis: TensorAxis) -> None:
        super().__init__()
        self.rate = rate
        self.place = place
        self.axis = axis

    def forward(self, x: Tensor, stream: RandomStream | None, positions: Positions) -> Tensor:
        """Return the activations x after dropout, or x itself if nothing is dropped. `stream` is
        the random stream of the step; None without dropout. `positions` are the positions that this
        rank has inside attention and MLP."""
        if stream is None or self.rate == 0.0:
            return x
        here = stream.at(*self.place, positions=self.axis.between_blocks(positions))
        return drop_hidden(x, here, self.rate, self.kernels)
