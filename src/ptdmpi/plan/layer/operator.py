"""An operator: one entry ("row") in the list that describes a model, with methods that return the
entry's costs.

The inputs and the outputs of an operator are named tensors. A sublayer in `describe.py` is an
ordered list of operators. For each kind of operator, `ptdmpi.model.operators` has a module or a
function that computes it. Time, memory, traffic and FLOPs of a step are sums and maxima over
operators (`folds.py`). These sums use only the methods of this class.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from ptdmpi.config import Layout, ModelConfig
from ptdmpi.config.layout import Dealing
from ptdmpi.plan.layer.account import Item, Kernel, MatrixProduct, MemoryPass, Message, Phase
from ptdmpi.plan.layer.parts import Part
from ptdmpi.plan.layer.sizes import Sizes

MASK_CHUNK_ELEMENTS = 2**18  # number of elements of a dropout mask that a CPU draws at once


@dataclass(frozen=True)
class Operator:
    """An operator of a model: its name, the names of the values that it reads and writes, and its
    costs.

    A value (an input or an output) is a tensor [rows, width] on each rank. `sizes.Rows` lists the
    possible numbers of rows. A value is freed after the last operator of its sublayer that reads
    it. The methods return the costs on one rank for one microbatch. Each kind of operator overrides
    the methods whose results are not empty.
    """

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    # True if the operator's tensors are large and cheap to compute, so that they are recomputed
    # under `recompute.mode = "selective"` (Korthikanti et al. 2022, arXiv 2205.05198, section 5).
    recomputed_selectively: ClassVar[bool] = False

    def parts(self) -> dict[str, Part]:
        """Return the parts of the model (linear layers, norms, tables and adapters) whose weights
        the operator uses, by name."""
        return {}

    def held(self, dealing: Dealing) -> dict[str, Part]:
        """Return those `parts` of the operator that one rank has if `dealing` distributes experts
        over ranks. Ranks with different experts have parts of the same shapes under different
        names. The keys of the result are the names on the first rank.
        """
        return self.parts()

    @property
    def trains(self) -> bool:
        """Return True if any part of the operator is trained."""
        return any(part.trains for part in self.parts().values())

    def refuses(self, layout: Layout) -> str | None:
        """Return the reason why the operator cannot be computed in a layout, and what would be
        legal; return None if it can be computed. If the method returns a reason, the dry run, the
        planner and the training refuse the layout."""
        return None

    def multiplications(self, model: ModelConfig) -> float:
        """Return the number of multiplications per row in the operator's forward matrix products,
        on all tensor-parallel ranks together. As in model FLOPs, all scores of a causal layer
        count, even those that are masked. (One multiplication counts as two FLOPs.)"""
        return 0.0

    def frozen_multiplications(self, model: ModelConfig) -> float:
        """Return the number of multiplications with frozen weights. If the operator has weights and
        all of them are frozen, the result is `multiplications`; otherwise the result is 0."""
        return self.multiplications(model) if self.parts() and not self.trains else 0.0

    # -- time -------------------------------------------------------------------------------------

    def forward(self, sizes: Sizes) -> Iterator[Kernel]:
        """Yield the kernels of the operator's forward."""
        yield from ()

    def backward(self, sizes: Sizes) -> Iterator[Kernel]:
        """Yield the kernels of the operator's backward, except those that the method `weights`
        yields."""
        yield from ()

    def weights(self, sizes: Sizes) -> Iterator[Kernel]:
        """Yield the kernels that compute the gradients of weight matrices. A split backward runs
        these kernels later, in W (gradients of the weights)."""
        yield from ()

    def recomputed(self, sizes: Sizes) -> Iterator[Kernel]:
        """Yield those kernels of the operator's forward that selective recomputation runs again."""
        yield from ()

    def messages(self, sizes: Sizes, phase: Phase, input_trains: bool = True) -> Iterator[Message]:
        """Yield the operator's messages in one phase (forward, backward, or a part of a split
        backward). `input_trains` is True if the operator's input has a gradient."""
        yield from ()

    # -- memory -----------------------------------------------------------------------------------

    def kept(self, sizes: Sizes, mode: str) -> Iterator[Item]:
        """Yield the tensors that autograd keeps for the operator's backward, under recomputation
        `mode`."""
        yield from ()

    def keeps_at_its_end(self, sizes: Sizes) -> bool:
        """Return True if the operator keeps a tensor that is complete only at the end of its
        forward. Full recomputation must then run all kernels and messages of the operator. The
        recomputation of a layer stops after the last operator that keeps such a tensor
        (`folds.recomputed`)."""
        return any(True for _ in self.kept(sizes, "none"))

    def operands(self, sizes: Sizes) -> Iterator[Item]:
        """Yield the tensors of this operator that a split backward keeps from I (gradient of the
        input) to W (gradients of the weights)."""
        yield from ()

    def forward_bytes(self, sizes: Sizes) -> int:
        """Return the most bytes that the operator's forward needs if there is no backward: the
        bytes of its inputs, its outputs, and copies of them. Operators that make no copies need not
        override this method, because `folds.idle_bytes` also counts the tensors that the layer
        would keep for a backward."""
        return 0

    def backward_bytes(self, sizes: Sizes) -> int:
        """Return the most bytes that the operator's backward needs, in addition to kept tensors and
        the gradient of the residual stream."""
        return 0

    def drawing_bytes(self, sizes: Sizes) -> int:
        """Return the number of bytes that are needed to draw the operator's dropout mask."""
        return 0

    def adding_bytes(self, sizes: Sizes) -> int:
        """Return the number of bytes that W (gradients of the weights) needs, in addition to its
        operands, to add the gradient of one matrix to the sum of gradients."""
        return 0

    def replaced_bytes(self, sizes: Sizes) -> int:
        """Return the bytes of the input that the operator keeps for its backward. During the
        operator's backward, the gradient of the input replaces the input in memory. The gradient is
        freed when the backward of the previous operator has used it."""
        return 0

    def excess_bytes(self, sizes: Sizes) -> int:
        """Return the number of bytes by which the gradient of the operator's input is larger than
        the kept input itself (`replaced_bytes`)."""
        return 0


def hash_bytes(elements: int) -> int:
    """Return the bytes of the hashes from which a dropout mask is computed: three int64 values for
    each of the elements that are drawn at once."""
    return 3 * 8 * min(elements, MASK_CHUNK_ELEMENTS)


def dropping_bytes(elements: int, sizes: Sizes) -> int:
    """Return the bytes that dropout of `elements` elements needs: the result, the mask and its
    hashes. A kernel in Triton needs only the result."""
    dropped = elements * sizes.compute_bytes
    return dropped if sizes.by_triton("dropout") else dropped + elements + hash_bytes(elements)


def weight_gradient(
    sizes: Sizes,
    inputs: int,
    outputs: int,
    rows: int,
    *,
    weights: int = 1,
    of_codes: bool = False,
) -> Iterator[Kernel]:
    """Yield the matrix product that computes the gradient of a weight [outputs, inputs] over `rows`
    rows, and the kernel that adds the gradient to the sum of gradients. `weights` is the number of
    equally large weights whose gradients are computed one after the other. `of_codes` is True if
    the operands are 8-bit codes with one scale for each matrix.

    The adding kernel reads the gradient, and reads and writes the sum. There is no adding kernel if
    the matrix product adds to the sum in place. This is possible only if the gradient and the sum
    have the same type."""
    yield MatrixProduct(inputs, outputs, rows, weights, launches=weights, of_codes=of_codes)
    e, g = sizes.compute_bytes, sizes.software.gradient_bytes
    if not (sizes.software.adds_in_place and e == g):
        yield MemoryPass(weights * inputs * outputs * (e + 2 * g), weights)


@dataclass(frozen=True)
class OwnOperator(Operator):
    """An operator of a sublayer that a user has written (`model.sublayers`). Unlike other
    operators, it also makes its own torch module."""

    def module(self, build: Any) -> Any:
        """Return the `torch.nn.Module` that computes this operator on one rank.

        The module's `forward(*inputs, context)` returns the outputs. `build` is a
        `ptdmpi.model.operators.Build` with the model's configuration, the tensor axis and the
        number of the layer. Parameters are made with `ptdmpi.model.parameters.declare`.
        """
        raise NotImplementedError(f"{type(self).__name__} makes no module")
