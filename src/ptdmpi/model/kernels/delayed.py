"""The matrix products of a layer's linear in 8-bit floating point with delayed scales
(`precision.compute = "fp8"`, `precision.fp8 = "delayed"`).

The operands of the products are the input x and the weight W, both in e4m3, and the gradient dy of
the output, in e5m2. Each operand has one scale, which is the same in every product and on every
rank (`low_bit.delayed`). Scales are computed from the magnitudes of earlier steps, so in the first
step W and dy have no scale, and are not rounded. The input x is rounded in the first step, too,
with the scale 1, because the backward reads its codes.

The values of the codes are exact in bfloat16, and are multiplied as bfloat16. A GPU that multiplies
8-bit numbers multiplies the codes themselves, by `torch._scaled_mm`, with sums in float32. The
result then differs only by the order of the additions. For this call, the first operand [m, k] must
have contiguous rows, the second operand [k, n] must have contiguous columns, and k and n must be
multiples of 16.
"""

import torch
from torch import Tensor

from ptdmpi.config.precision import PRECISIONS
from ptdmpi.model.kernels import Kernels, host, operand
from ptdmpi.model.low_bit.delayed import DelayedScales, Operand, decoded, encoded
from ptdmpi.model.parameters import dtype_of

RECIPE = PRECISIONS["fp8"].product
# the 8-bit type of each operand
KINDS: dict[Operand, torch.dtype] = {
    "input": dtype_of(RECIPE.operands),
    "weight": dtype_of(RECIPE.operands),
    "gradient": dtype_of(RECIPE.gradients or RECIPE.operands),
}


class DelayedKernels(Kernels):
    """The kernels of one linear whose products are in 8-bit floating point with the scales
    `scales`.

    If `keeps_codes` is True, the forward keeps the codes of the input for the backward. Otherwise
    it keeps the input itself, which needs no additional memory if another operator also keeps the
    input.
    """

    def __init__(self, kernels: Kernels, scales: DelayedScales, *, keeps_codes: bool) -> None:
        super().__init__(kernels.choice, kernels.precision, triton=kernels.triton)
        self.scales = scales
        self.keeps_codes = keeps_codes

    def entering(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        if not self.keeps_codes:
            return self._rounded("input", x), (x,)
        codes = self._encoded("input", x)
        return decoded(codes, self._of_input, x.dtype), (codes,)

    def entered(self, kept: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
        if not self.keeps_codes:
            return self._rounded("input", kept[0])
        return decoded(kept[0], self._of_input, dtype)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        weight = self._rounded("weight", operand(weight))
        if not self._multiplies(x, ("input", "weight"), x.shape[-1], len(weight)):
            return super().linear(x, weight, bias)
        codes = (self._codes("input", x.flatten(0, -2)), self._codes("weight", weight))
        y = self._product(("input", "weight"), *codes, bias=bias, dtype=x.dtype)
        return y.view(*x.shape[:-1], len(weight))

    def input_gradient(self, dy: Tensor, weight: Tensor) -> Tensor:
        weight = self._rounded("weight", operand(weight))
        dy = self._rounded("gradient", dy)
        if not self._multiplies(dy, ("gradient", "weight"), *weight.shape):
            return super().input_gradient(dy, weight)
        codes = (self._codes("gradient", dy.flatten(0, -2)), self._codes("weight", weight.t()))
        dx = self._product(("gradient", "weight"), *codes, dtype=dy.dtype)
        return dx.view(*dy.shape[:-1], weight.shape[1])

    def add_weight_gradient(self, total: Tensor, dy: Tensor, x: Tensor) -> None:
        dy = self._rounded("gradient", dy)
        positions = dy.shape[:-1].numel()
        if not self._multiplies(dy, ("gradient", "input"), positions, x.shape[-1]):
            super().add_weight_gradient(total, dy, x)
            return
        rows = (dy.flatten(0, -2).t(), x.flatten(0, -2).t())
        codes = (self._codes("gradient", rows[0]), self._codes("input", rows[1]))
        total += self._product(("gradient", "input"), *codes, dtype=total.dtype)

    def _multiplies(self, x: Tensor, names: tuple[Operand, Operand], k: int, n: int) -> bool:
        """Return True if the device of x can multiply the codes of the operands `names`, whose
        shapes are [m, k] and [k, n]."""
        scaled = all(name == "input" or name in self.scales.exponents for name in names)
        return scaled and not (k % 16 or n % 16) and host.multiplies_codes(x.device)

    def _codes(self, name: Operand, values: Tensor) -> Tensor:
        """Return the 8-bit codes of the operand `name`, with contiguous rows. `values` has the
        values that these codes represent."""
        factor = 2.0 ** self.scales.exponents.get(name, 0)
        return (values * factor).to(KINDS[name], memory_format=torch.contiguous_format)

    def _product(
        self,
        names: tuple[Operand, Operand],
        a: Tensor,
        b: Tensor,
        *,
        bias: Tensor | None = None,
        dtype: torch.dtype,
    ) -> Tensor:
        """Return a b^T + bias, [m, n], in the type `dtype`. The arguments a [m, k] and b [n, k] are
        8-bit codes. The result is computed from the values that these codes represent. `names` are
        the names of the two operands, which determine their scales."""
        scales = [
            torch.full((), 2.0 ** -self.scales.exponents.get(name, 0), device=a.device)
            for name in names
        ]
        return torch._scaled_mm(a, b.t(), scales[0], scales[1], bias=bias, out_dtype=dtype)

    @property
    def _of_input(self) -> int:
        return self.scales.exponents.get("input", 0)

    def _encoded(self, name: Operand, x: Tensor) -> Tensor:
        greatest = self.scales.saw(name, x)
        return encoded(x, self.scales.exponents.get(name, 0), KINDS[name], greatest)

    def _rounded(self, name: Operand, x: Tensor) -> Tensor:
        """Return x, the tensor of the operand `name`, rounded to values that 8-bit codes represent.
        Return x itself if the operand has no scale yet."""
        if name != "input" and name not in self.scales.exponents:
            self.scales.saw(name, x)
            return x
        return decoded(self._encoded(name, x), self.scales.exponents.get(name, 0), x.dtype)
