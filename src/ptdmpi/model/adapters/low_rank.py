"""LoRA on a linear that the tensor axis divides (Hu et al. 2021, arXiv 2106.09685).

    y = x W^T + b + scale (drop(x) A^T) B^T

In a column-parallel linear B is divided as W is, and A is whole on every rank; each rank's gradient
of A is a part, to be summed over the tensor axis once in a step. In a row-parallel linear A is
divided as W is, and B is whole: the rank's part of the product is added before the sum of W's
parts, so that no further message is sent.
"""

from collections.abc import Callable

from torch import Tensor

from ptdmpi.model.kernels import Computing
from ptdmpi.model.parameters import Split, declare
from ptdmpi.model.random import RandomStream, dropout
from ptdmpi.plan.layer.parts import LowRankPair


class LowRankAdapter(Computing):
    """The product B A, added to the outputs `columns` of a linear on this tensor rank. It is not
    called by itself: forward and backward of the linear call its methods."""

    def __init__(self, part: LowRankPair, tensor: tuple[int, int], columns: slice) -> None:
        """`tensor`: (rank, size) of the tensor axis."""
        super().__init__()
        rank, size = tensor
        self.part = part
        self.columns = columns
        self.first_channel = 0
        inputs: Split | None = None
        outputs: Split | None = None
        rows = part.split == "rows"
        if rows:
            inputs = Split.of_one(1, part.inputs)
            self.first_channel = rank * part.local(size)[0]
        else:
            outputs = Split.of_one(0, part.outputs, part.most)
        # the variance that `peft` begins with: uniform in +-1/sqrt(inputs)
        std = (3 * part.inputs) ** -0.5
        shape_of_a = (part.rank, part.inputs)
        shape_of_b = (part.outputs, part.rank)
        self.a = declare(size, shape_of_a, std, split=inputs, partial_gradient=not rows)
        self.b = declare(size, shape_of_b, "zeros", split=outputs, partial_gradient=rows)

    def drop(self, x: Tensor, stream: RandomStream | None) -> Tensor:
        """Apply dropout to the input, or to its gradient; the mask is drawn again, not kept."""
        if stream is None or self.part.dropout == 0.0:
            return x
        at = stream.at(self.part.number, first_channel=self.first_channel)
        return dropout(x, at.hidden_mask(x.shape, self.part.dropout), self.part.dropout)

    def add_to(self, y: Tensor, x: Tensor, stream: RandomStream | None) -> Tensor:
        """Add scale drop(x) A^T B^T to `y` [s, b, o], in place; return drop(x) A^T [s, b, r]."""
        down = self.kernels.linear(self.drop(x, stream), self.a)
        y[..., self.columns].add_(self.kernels.linear(down, self.b), alpha=self.part.scale)
        return down

    def up(self, dy: Tensor) -> Tensor:
        """Return scale dy B [s, b, r], the gradient of drop(x) A^T. If B is column-parallel, it is
        only this rank's part of the gradient."""
        return self.kernels.input_gradient(dy[..., self.columns], self.b) * self.part.scale

    def add_input_gradient(self, dx: Tensor, up: Tensor, stream: RandomStream | None) -> None:
        """Add the gradient of x to `dx`, in place."""
        dx.add_(self.drop(self.kernels.input_gradient(up, self.a), stream))

    def accumulate(
        self,
        operands: tuple[Callable[[], Tensor], Callable[[], Tensor]],
        down: Tensor,
        up: Tensor,
        stream: RandomStream | None,
    ) -> None:
        """Add to the gradients of A and B, at once or later; `operands` return x and dy at that
        time."""
        x, dy = operands
        if self.a.requires_grad:
            self.a.accumulate(
                lambda total: self.kernels.add_weight_gradient(total, up, self.drop(x(), stream))
            )
        if self.b.requires_grad:
            scaled = down * self.part.scale
            self.b.accumulate(
                lambda total: self.kernels.add_weight_gradient(
                    total, dy()[..., self.columns], scaled
                )
            )
