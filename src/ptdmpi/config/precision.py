"""The table of numeric precisions, with one row for each. The model, the planner and the checks
read this table.

`precision.compute` names a row. Nothing else lists precisions: other code reads the types and their
bytes from this table. A new precision needs a row here and its name in `PrecisionName`. If its
products need more than operands of another type (such as scales), it also needs a kernel
(`ptdmpi.model.kernels`).
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

PrecisionName = Literal["bf16", "fp16", "fp32", "fp64"]


class NumberType(NamedTuple):
    """A type of numbers: its name in torch, and the bytes of one number."""

    name: str
    bytes: int


BFLOAT16 = NumberType("bfloat16", 2)
FLOAT16 = NumberType("float16", 2)
FLOAT32 = NumberType("float32", 4)
FLOAT64 = NumberType("float64", 8)


@dataclass(frozen=True)
class Recipe:
    """The types in which a layer's matrix products are computed.

    `operands` is the type of both matrices. A processor that cannot multiply numbers of that type
    uses the type `sums` for the matrices, too. `sums` is the type in which the products of two
    numbers are added. `scales` says which elements of a matrix (such as a row) share one factor,
    which scales the elements into the range of the type. It is "none" if the type needs no factor.
    """

    operands: NumberType
    sums: NumberType
    scales: Literal["none", "tensor", "row"] = "none"


@dataclass(frozen=True)
class Precision:
    """The types of one run.

    `compute` is the type of weights and activations. `master` is the type of master weights,
    gradients, and the optimizer's state. `product` has the types of the layers' matrix products.
    `iteration` is the type of the matrix products with which Muon makes an update orthogonal. If
    `scales_loss` is True, the loss is scaled, because small gradients would underflow in the type.
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
