"""The terms in which an operator describes its costs: kernels, messages, and tensors that stay in
memory.

An operator (`operator.py`) describes its work by kernels, messages and tensors. `plan.cost.layer`
computes the times of kernels and messages on a cluster. `folds.py` adds up the tensors in memory
and the bytes of messages.

For some kernels only the launch is counted, and no time (`priced` is False). The efficiencies of
clusters were calibrated with published times of whole layers. The times of the other kernels
therefore include the time of the kernels that have no time of their own.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from ptdmpi.config.choices import RECOMPUTE_MODES


@dataclass(frozen=True)
class MatrixProduct:
    """A number of matrix products: `batch` products of matrices [m, k] and [k, n]. They are
    computed by `launches` kernels. If `of_codes` is True, a device that can multiplies 8-bit codes
    with one scale for each matrix."""

    m: int
    n: int
    k: int
    batch: int = 1
    launches: int = 1
    of_codes: bool = False
    priced = True

    @property
    def flops(self) -> float:
        """Return the number of floating-point operations: m n k multiplications and m n k additions
        for each product."""
        return 2.0 * self.batch * self.m * self.n * self.k


@dataclass(frozen=True)
class MemoryPass:
    """A kernel whose time depends only on the `moved_bytes` that it reads and writes, because it
    computes little.

    `launches` is the number of kernels that together move these bytes.
    """

    moved_bytes: float
    launches: int = 1
    priced: bool = True
    flops = 0.0


@dataclass(frozen=True)
class Elementwise:
    """Kernels that each process `elements` elements. Each entry of `element_bytes` is the number of
    bytes that one kernel moves per element.

    `kind` names the operation ("gelu", "layernorm_backward"): a cluster file with measurements has
    a time per element for this operation.
    """

    kind: str
    elements: int
    element_bytes: tuple[float, ...]
    priced: bool = True
    flops = 0.0

    @property
    def launches(self) -> int:
        """Return the number of kernels."""
        return len(self.element_bytes)


@dataclass(frozen=True)
class FusedAttention:
    """Attention whose scores stay on chip, for `rows` queries with `columns` keys each.

    `products` is the number of matrix products: 2 forward and 5 backward (Dao et al. 2022, arXiv
    2205.14135, algorithm 4). `seen` is the fraction of the causal scores that lie in the sliding
    window.
    """

    rows: int
    columns: int
    head_size: int
    products: int
    seen: float = 1.0
    launches = 1
    priced = True

    @property
    def flops(self) -> float:
        """Return the number of floating-point operations. By the convention of model FLOPs, every
        pair of a query and a key is counted, even if it is masked."""
        return 2.0 * self.products * self.rows * self.columns * self.head_size


Kernel = MatrixProduct | MemoryPass | Elementwise | FusedAttention

Collective = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all"]
# The phases of an operator: its forward and its backward. A split backward has two phases instead:
# "inputs" (I) computes the gradient of the input, and "weights" (W) the gradients of the weights.
Phase = Literal["forward", "backward", "inputs", "weights"]


@dataclass(frozen=True)
class Message:
    """A collective of an activation or its gradient over an axis of the grid.

    `whole_bytes` is the size of the whole tensor, as `base.traffic` defines it. `behind` has the
    kernels that run at the same time as the message, on clusters that overlap kernels and messages.
    `pieces` is the number of messages that published programs send instead of one; the latency is
    counted once for each of these messages. `to_next` marks an all-to-all in which each rank sends
    the whole tensor to the next rank.
    """

    collective: Collective
    whole_bytes: int
    axis: str = "tensor"
    behind: tuple[Kernel, ...] = ()
    pieces: int = 1
    to_next: bool = False


@dataclass(frozen=True)
class Item:
    """A tensor that stays in memory, with `elements` elements of `element_bytes` bytes each.

    `kept_up_to` is the last mode of recomputation, in the order none, selective, full, that keeps
    the tensor.
    """

    name: str
    elements: int
    element_bytes: int
    kept_up_to: str = "selective"

    @property
    def bytes(self) -> int:
        """Return the bytes of the tensor on one rank."""
        return self.elements * self.element_bytes


def kept(items: Iterable[Item], mode: str) -> list[Item]:
    """Return the tensors in `items` that recomputation `mode` keeps until the backward pass."""
    rank = RECOMPUTE_MODES.index
    return [item for item in items if rank(mode) <= rank(item.kept_up_to)]


def total_bytes(items: Iterable[Item]) -> int:
    """Return the total bytes of the tensors in `items`."""
    return sum(item.bytes for item in items)
