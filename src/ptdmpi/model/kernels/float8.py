"""The matrix products of a layer's linear in 8-bit floating point with one scale for each block
(`precision.compute = "fp8"`, `precision.fp8 = "block"`).

In an activation or a gradient, a tile of 128 elements shares a scale; the elements of a tile are
neighbours along the dim over which the product sums. In a weight, a square of 128 x 128 elements
shares a scale (DeepSeek-AI 2024, arXiv 2412.19437, section 3.3.2):

    y = x W^T     x, W in e4m3      x in tiles along its rows, W in squares
    dx = dy W     dy in e5m2        dy in tiles along its rows, W in squares
    dW = dy^T x   dy in e5m2        dy and x in tiles along their columns

The forward keeps the codes of x and their scales. For dW, the values that these codes represent are
rounded again, in tiles along the columns.

Before each product, both operands are rounded to 8-bit codes with scales. The scales are powers of
two, so the rounded values are exact in bfloat16, and are multiplied as bfloat16.
"""

import torch
from torch import Tensor

from ptdmpi.config.precision import PRECISIONS
from ptdmpi.model.kernels import Kernels, operand
from ptdmpi.model.low_bit.float8 import (
    ALONG_COLUMNS,
    ALONG_ROWS,
    OF_WEIGHTS,
    Scaled,
    rounded,
    scaled,
)
from ptdmpi.model.parameters import dtype_of


class Float8Kernels(Kernels):
    """The kernels of one linear whose products are in 8-bit floating point.

    If `keeps_codes` is True, the forward keeps the codes of the input for the backward. Otherwise
    it keeps the input itself, which needs no additional memory if another operator also keeps the
    input.
    """

    def __init__(self, kernels: Kernels, *, keeps_codes: bool) -> None:
        super().__init__(kernels.choice, kernels.precision, triton=kernels.triton)
        self.keeps_codes = keeps_codes
        recipe = PRECISIONS["fp8"].product
        self.kind = dtype_of(recipe.operands)
        self.gradients = dtype_of(recipe.gradients or recipe.operands)

    def entering(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        if not self.keeps_codes:
            return self._along_rows(x, self.kind), (x,)
        codes = scaled(x.flatten(0, -2), ALONG_ROWS, self.kind)
        values = codes.values(x.dtype).view(x.shape)
        return values, (codes.codes.view(x.shape), codes.scales)

    def entered(self, kept: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
        if not self.keeps_codes:
            return self._along_rows(kept[0], self.kind)
        codes, scales = kept
        values = Scaled(codes.flatten(0, -2), scales, ALONG_ROWS).values(dtype)
        return values.view(codes.shape)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return super().linear(x, self._weight(weight), bias)

    def input_gradient(self, dy: Tensor, weight: Tensor) -> Tensor:
        dy = self._along_rows(dy, self.gradients)
        return super().input_gradient(dy, self._weight(weight))

    def add_weight_gradient(self, total: Tensor, dy: Tensor, x: Tensor) -> None:
        x = rounded(x.flatten(0, -2), ALONG_COLUMNS, self.kind)
        dy = rounded(dy.flatten(0, -2), ALONG_COLUMNS, self.gradients)
        super().add_weight_gradient(total, dy, x)

    def _weight(self, weight: Tensor) -> Tensor:
        return rounded(operand(weight), OF_WEIGHTS, self.kind)

    def _along_rows(self, x: Tensor, kind: torch.dtype) -> Tensor:
        return rounded(x.flatten(0, -2), ALONG_ROWS, kind).view(x.shape)
