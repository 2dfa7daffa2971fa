"""The table of numeric precisions, with one row per precision. The model, the planner and the
checks read this table.

`precision.compute` names a row of the table. No other code lists precisions: all code reads the
types and their sizes in bytes from this table. A new precision needs a row here and its name in
`PrecisionName`. A row and a name are enough if only the type of the operands of matrix products is
new. If the matrix products of the new precision need more, for example scales, the precision also
needs a kernel (`ptdmpi.model.kernels`).

In the precision fp8, weights and activations have the type bfloat16, but the linear layers inside
the transformer layers round the operands of their matrix products to 8-bit floating point. Inputs
and weights are rounded to e4m3 (4 bits of exponent, 3 of mantissa, largest value 448), and the
gradients of outputs to e5m2 (largest value 57344). These types follow Micikevicius et al. 2022
(arXiv 2209.05433, section 3), and are the default of NVIDIA's Transformer Engine. The embedding
before the first layer and the output head after the last layer always compute in bfloat16.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

PrecisionName = Literal["bf16", "fp16", "fp32", "fp64", "fp8"]
# The groups of numbers that share one scale in the precision fp8: the numbers of a block ("block"),
# or of a whole tensor ("delayed"). With "delayed", the scale is chosen before the step, from the
# values of earlier steps.
ScalingName = Literal["block", "delayed"]
Scaling = Literal["none", "block", "delayed"]  # "none": the precision needs no scales.
# The length of the blocks of numbers that share a scale. In a weight, a block has 128 rows and 128
# columns. In another operand, a block is 128 neighbouring numbers of a row (DeepSeek-AI 2024, arXiv
# 2412.19437, section 3.3.2).
SCALED_BLOCK = 128


class NumberType(NamedTuple):
    """A type of numbers. `name` is torch's name of the type, and `bytes` is the size of one number
    in bytes."""

    name: str
    bytes: int


BFLOAT16 = NumberType("bfloat16", 2)
FLOAT16 = NumberType("float16", 2)
FLOAT32 = NumberType("float32", 4)
FLOAT64 = NumberType("float64", 8)
FLOAT8_E4M3 = NumberType("float8_e4m3fn", 1)
FLOAT8_E5M2 = NumberType("float8_e5m2", 1)


@dataclass(frozen=True)
class Recipe:
    """The number types that the linear layers inside the transformer layers use in their matrix
    products.

    `operands` is the type of both matrices. A processor that cannot multiply numbers of this type
    converts the matrices to a wider type. `sums` is the type in which the products of two numbers
    are added. `gradients` is the type of the gradient of an output; None means that this type is
    `operands`. If `scaled` is True, the numbers of a matrix form groups, and `Scaling` says which
    numbers form a group. Each group is multiplied by a factor (the scale of the group), which
    brings the numbers of the group into the range of the type. With `scaled`, only the linear
    layers inside the transformer layers use these types. All other matrix products have the type of
    the activations.
    """

    operands: NumberType
    sums: NumberType
    gradients: NumberType | None = None
    scaled: bool = False


@dataclass(frozen=True)
class Precision:
    """The number types that a run uses.

    `compute` is the type of weights and activations. `master` is the type of master weights,
    gradients, and the optimizer's state. `product` has the types of the matrix products in linear
    layers. `iteration` is the type of the matrix products in Muon's orthogonalization of an update.
    If `scales_loss` is True, the loss is multiplied by a scale, because small gradients would
    underflow in the type `compute`.
    """

    compute: NumberType
    master: NumberType
    product: Recipe
    iteration: NumberType = BFLOAT16
    scales_loss: bool = False

    @property
    def has_masters(self) -> bool:
        """Return True if the master weights and the weights have different types."""
        return self.compute != self.master


PRECISIONS: dict[str, Precision] = {
    "bf16": Precision(BFLOAT16, FLOAT32, Recipe(BFLOAT16, FLOAT32)),
    "fp16": Precision(FLOAT16, FLOAT32, Recipe(FLOAT16, FLOAT32), scales_loss=True),
    "fp32": Precision(FLOAT32, FLOAT32, Recipe(FLOAT32, FLOAT32)),
    "fp64": Precision(FLOAT64, FLOAT64, Recipe(FLOAT64, FLOAT64), iteration=FLOAT64),
    "fp8": Precision(BFLOAT16, FLOAT32, Recipe(FLOAT8_E4M3, FLOAT32, FLOAT8_E5M2, scaled=True)),
}


def scaling_of(precision: str, scaling: ScalingName = "block") -> Scaling:
    """Return which numbers share a scale in the matrix products of linear layers. The result is
    `scaling`, or "none" if these products need no scales in this precision."""
    return scaling if PRECISIONS[precision].product.scaled else "none"
