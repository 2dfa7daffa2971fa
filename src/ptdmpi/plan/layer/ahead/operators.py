"""The operators that only multi-token prediction has: the repeated uses of the embedding table and
of the output head, and the concatenation of two activations."""

from collections.abc import Iterator
from dataclasses import dataclass

from ptdmpi.plan.layer.account import Kernel, MemoryPass
from ptdmpi.plan.layer.ends import LookUp, Predict
from ptdmpi.plan.layer.operator import Operator
from ptdmpi.plan.layer.parts import Part
from ptdmpi.plan.layer.sizes import Sizes


@dataclass(frozen=True)
class LookUpAgain(LookUp):
    """A second or later look-up in the table of the embedding, by a module for multi-token
    prediction. The operator has no parts, because the first look-up already counts the parameters
    of the table."""

    def parts(self) -> dict[str, Part]:
        return {}


@dataclass(frozen=True)
class PredictAgain(Predict):
    """A second or later use of the output head, by a module for multi-token prediction. The
    operator has no parts, because the first use already counts the parameters of the head."""

    def parts(self) -> dict[str, Part]:
        return {}


@dataclass(frozen=True)
class Concatenate(Operator):
    """Two activations [local rows, hidden size] -> one activation [local rows, 2 x hidden size]."""

    def forward(self, sizes: Sizes) -> Iterator[Kernel]:
        yield MemoryPass(2 * 2 * sizes.local_tokens * sizes.model.hidden * sizes.compute_bytes)
