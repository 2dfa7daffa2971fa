"""LoRA adapters for a linear whose weight is divided over the tensor axis (Hu et al. 2021, arXiv
2106.09685). The trained matrices A and B of an adapter change the output y of a linear with the
weight W and the bias b:

    y = x W^T + b + scale (drop(x) A^T) B^T

In a column-parallel linear, B is divided in the same way as W, and every rank has the full A. Each
rank computes only one term of the gradient of A, and the terms are summed over the tensor axis once
per step. In a row-parallel linear, A is divided in the same way as W, and every rank has the full
B. The adapter's partial product is added to the partial product of W before the all-reduce, so no
additional message is sent for the adapter.
"""

from collections.abc import Callable

from torch import Tensor

from ptdmpi.model.kernels import Computing
from ptdmpi.model.kernels.dropout import drop_hidden
from ptdmpi.model.parameters import Split, declare
from ptdmpi.model.random import RandomStream
from ptdmpi.plan.layer.parts import LowRankPair


class LowRankAdapter(Computing):
    """The matrices A and B of a LoRA adapter, on one tensor rank. The adapter changes the outputs
    `columns` of a linear. The forward and the backward of the linear call the adapter's methods;
    the adapter itself has no forward method."""

    def __init__(self, part: LowRankPair, tensor: tuple[int, int], columns: slice) -> None:
        """Declare the matrices A and B. `part` is the planner's description of the adapter.
        `tensor` is (this rank's number on the tensor axis, size of the tensor axis). `columns` are
        the adapted outputs on this rank."""
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
        # the initial variance is the same as in the package `peft`, which draws from a uniform
        # distribution between -1/sqrt(inputs) and 1/sqrt(inputs)
        std = (3 * part.inputs) ** -0.5
        shape_of_a = (part.rank, part.inputs)
        shape_of_b = (part.outputs, part.rank)
        self.a = declare(size, shape_of_a, std, split=inputs, partial_gradient=not rows)
        self.b = declare(size, shape_of_b, "zeros", split=outputs, partial_gradient=rows)

    def drop(self, x: Tensor, stream: RandomStream | None) -> Tensor:
        """Return `x` after dropout. In the forward, `x` is the linear's input; in the backward, it
        is the gradient of the input. If `stream` is None, return `x` unchanged. The backward
        computes the dropout mask again, so the mask is not stored."""
        if stream is None or self.part.dropout == 0.0:
            return x
        at = stream.at(self.part.number, first_channel=self.first_channel)
        return drop_hidden(x, at, self.part.dropout, self.kernels)

    def add_to(self, y: Tensor, x: Tensor, stream: RandomStream | None) -> Tensor:
        """Add scale drop(x) A^T B^T to the linear's output `y` [s, b, outputs], in place. Return
        drop(x) A^T [s, b, rank of the adapter]."""
        down = self.kernels.linear(self.drop(x, stream), self.a)
        y[..., self.columns].add_(self.kernels.linear(down, self.b), alpha=self.part.scale)
        return down

    def up(self, dy: Tensor) -> Tensor:
        """Return scale dy B [s, b, rank of the adapter], the gradient of drop(x) A^T. In a
        column-parallel linear, the result is only this rank's term of a sum over the tensor ranks.
        """
        return self.kernels.input_gradient(dy[..., self.columns], self.b) * self.part.scale

    def add_input_gradient(self, dx: Tensor, up: Tensor, stream: RandomStream | None) -> None:
        """Add the adapter's contribution to the gradient of the input x to `dx`, in place. The
        argument `up` [s, b, rank of the adapter] is the gradient of drop(x) A^T, as computed by the
        method `up`."""
        dx.add_(self.drop(self.kernels.input_gradient(up, self.a), stream))

    def accumulate(
        self,
        operands: tuple[Callable[[], Tensor], Callable[[], Tensor]],
        down: Tensor,
        up: Tensor,
        stream: RandomStream | None,
        *,
        alone: bool = False,
    ) -> None:
        """Add this microbatch's gradients of A and B to the gradient buffers. In a split backward,
        the gradients are computed and added in the second part (op W). `operands` are two
        functions, which are called at that time: the first returns the linear's input x, and the
        second returns the gradient dy of the linear's output. The argument `down` is drop(x) A^T,
        as computed by `add_to`. The argument `up` is the gradient of drop(x) A^T, as computed by
        the method `up`. If `alone` is True, each gradient is rounded to the type of the gradient
        buffer before it is added (see `Parameter.accumulate`)."""
        x, dy = operands
        if self.a.requires_grad:
            self.a.accumulate(
                lambda total: self.kernels.add_weight_gradient(total, up, self.drop(x(), stream)),
                alone=alone,
            )
        if self.b.requires_grad:
            scaled = down * self.part.scale
            self.b.accumulate(
                lambda total: self.kernels.add_weight_gradient(
                    total, dy()[..., self.columns], scaled
                ),
                alone=alone,
            )
