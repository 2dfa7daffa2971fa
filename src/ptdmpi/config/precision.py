"""The table of numeric precisions, with one row for each. The model, the planner and the checks
read this table.

`precision.compute` names a row of the table. No other code lists precisions: all code reads the
types and their sizes in bytes from this table. A new precision needs a row here and its name in
`PrecisionName`. If the matrix products of the new precision need more than operands of another
type, for example scales, the precision also needs a kernel (`ptdmpi.model.kernels`).
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

PrecisionName = Literal["bf16", "fp16", "fp32", "fp64"]


class NumberType(NamedTuple):
    """A type of numbers: the name of the type in torch, and the number of bytes of one number."""

    name: str
    bytes: int


BFLOAT16 = NumberType("bfloat16", 2)
FLOAT16 = NumberType("float16", 2)
FLOAT32 = NumberType("float32", 4)
FLOAT64 = NumberType("float64", 8)


@dataclass(frozen=True)
class Recipe:
    """The types in which a layer's matrix products are computed.

    `operands` is the type of both matrices. A processor that cannot multiply numbers of this type
    converts the matrices to the type `sums`. `sums` is the type in which the products of two
    numbers are added. `scales` is the part of a matrix (such as a row) whose elements share one
    factor, which scales them into the range of the type. `scales` is "none" if the type needs no
    factor.
    """

    operands: NumberType
    sums: NumberType
    scales: Literal["none", "tensor", "row"] = "none"


@dataclass(frozen=True)
class Precision:
    """The number types that a run uses.

    `compute` is the type of weights and activations. `master` is the type of master weights,
    gradients, and the optimizer's state. `product` has the types of the layers' matrix products.
    `iteration` is the type of the matrix products with which Muon makes an update orthogonal. If
    `scales_loss` is True, the loss is multiplied by a scale, because small gradients would
    underflow in the type `compute`.
    """

    compute: NumberType
    master: NumberType
    product: Recipe
    iteration: NumberType = BFLOAT16
    scales_loss: bool = False

    @property
    def has_masters(self) -> bool:
        """Return True if the master weights have another type than the weights."""
        return self.compute != self.master


PRECISIONS: dict[str, Precision] = {
    "bf16": Precision(BFLOAT16, FLOAT32, Recipe(BFLOAT16, FLOAT32)),
    "fp16": Precision(FLOAT16, FLOAT32, Recipe(FLOAT16, FLOAT32), scales_loss=True),
    "fp32": Precision(FLOAT32, FLOAT32, Recipe(FLOAT32, FLOAT32)),
    "fp64": Precision(FLOAT64, FLOAT64, Recipe(FLOAT64, FLOAT64), iteration=FLOAT64),
}
