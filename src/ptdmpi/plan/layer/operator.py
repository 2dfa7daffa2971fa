"""An operator: one row in the description of a model, with methods that return its costs.

A row reads named values and writes named values. A sublayer in `describe.py` is a list of rows in
order. `ptdmpi.model.operators` has one module or function for each kind of row, which computes it.
Time, memory, traffic and FLOPs of a step are sums and maxima over rows (`folds.py`), which use
nothing but these methods.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from ptdmpi.config import Layout, ModelConfig
from ptdmpi.plan.layer.account import Item, Kernel, Message, Phase
from ptdmpi.plan.layer.parts import Part
from ptdmpi.plan.layer.sizes import Sizes

MASK_CHUNK_ELEMENTS = 2**18  # elements of a dropout mask that are drawn at once (on a CPU)


@dataclass(frozen=True)
class Operator:
    """A row of the description: its name, the values that it reads and writes, and its costs.

    Values are [rows, width] on each rank (`sizes.Rows` has the rows). A value is freed after the
    last row of its sublayer that reads it. The methods return the costs; each kind of operator
    overrides the methods whose results are not empty. Sizes are for one rank and one microbatch.
    """

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    # True if its tensors are cheap to compute and large: they are recomputed under `recompute.mode
    # = "selective"` (Korthikanti et al. 2022, arXiv 2205.05198, section 5).
    recomputed_selectively: ClassVar[bool] = False

    def parts(self) -> dict[str, Part]:
        """Return the parts of the model that the operator trains or multiplies with, by name."""
        return {}

    def held(self, expert: int) -> dict[str, Part]:
        """Return the operator's `parts` that one rank has if experts are distributed over `expert`
        ranks. The result has the names of the first rank; all other ranks have parts of the same
        shapes."""
        return self.parts()

    @property
    def trains(self) -> bool:
        """Return True if any part of the operator trains."""
        return any(part.trains for part in self.parts().values())

    def refuses(self, layout: Layout) -> str | None:
        """Return why the operator cannot be computed in a layout, and what would be legal; None if
        it can. The dry run, the planner and the training then refuse the layout."""
        return None

    def multiplications(self, model: ModelConfig) -> float:
        """Return the multiplications per row of its forward products on all tensor ranks together,
        as for model FLOPs, in which each multiplication is two FLOPs and a causal layer computes
        all scores."""
        return 0.0

    def frozen_multiplications(self, model: ModelConfig) -> float:
        """Return the `multiplications` with weights that do not train: all of them if the operator
        has parts and none of the parts trains."""
        return self.multiplications(model) if self.parts() and not self.trains else 0.0

    # -- time -------------------------------------------------------------------------------------

    def forward(self, sizes: Sizes) -> Iterator[Kernel]:
        """Yield the kernels of its forward."""
        yield from ()

    def backward(self, sizes: Sizes) -> Iterator[Kernel]:
        """Yield the kernels of its backward, except those of `weights`."""
        yield from ()

    def weights(self, sizes: Sizes) -> Iterator[Kernel]:
        """Yield the kernels that a split backward delays until its W: the gradients of matrices."""
        yield from ()

    def recomputed(self, sizes: Sizes) -> Iterator[Kernel]:
        """Yield the kernels that selective recomputation computes again."""
        yield from ()

    def messages(self, sizes: Sizes, phase: Phase, input_trains: bool = True) -> Iterator[Message]:
        """Yield the operator's messages in a phase. `input_trains`: the operator's input has a
        gradient."""
        yield from ()

    # -- memory -----------------------------------------------------------------------------------

    def kept(self, sizes: Sizes, mode: str) -> Iterator[Item]:
        """Yield the tensors that autograd keeps for its backward, under a mode of recomputation."""
        yield from ()

    def keeps_at_its_end(self, sizes: Sizes) -> bool:
        """Return True if the operator keeps a tensor that is complete only at the end of its
        forward. Its recomputation then includes all of its kernels and messages."""
        return any(True for _ in self.kept(sizes, "none"))

    def operands(self, sizes: Sizes) -> Iterator[Item]:
        """Yield the tensors of this operator that a split backward keeps from its I to its W."""
        yield from ()

    def forward_bytes(self, sizes: Sizes) -> int:
        """Return the maximal bytes of its forward if there is no backward: its inputs and outputs,
        and copies of these. Rows without copies need not override this method."""
        return 0

    def backward_bytes(self, sizes: Sizes) -> int:
        """Return the most bytes that its backward needs, without kept tensors and its gradient."""
        return 0

    def drawing_bytes(self, sizes: Sizes) -> int:
        """Return the bytes that are needed at once to draw its dropout mask."""
        return 0

    def adding_bytes(self, sizes: Sizes) -> int:
        """Return the bytes that W needs, without its operands, to add one gradient of a matrix."""
        return 0

    def replaced_bytes(self, sizes: Sizes) -> int:
        """Return the bytes of its kept input, which is freed once the input's gradient has been
        used."""
        return 0


def hash_bytes(elements: int) -> int:
    """Return the bytes for drawing a dropout mask: three int64 values per element at a time."""
    return 3 * 8 * min(elements, MASK_CHUNK_ELEMENTS)


@dataclass(frozen=True)
class OwnOperator(Operator):
    """A row of a sublayer of the user's own (`model.sublayers`), which also makes its module."""

    def module(self, build: Any) -> Any:
        """Return the module that computes this row on one rank, a `torch.nn.Module`.

        Its `forward(*inputs, context)` returns the outputs. `build`, of the class
        `ptdmpi.model.operators.Build`, has the model's configuration, the tensor axis and the
        number of the layer. Parameters are made with `ptdmpi.model.parameters.declare`.
        """
        raise NotImplementedError(f"{type(self).__name__} makes no module")
