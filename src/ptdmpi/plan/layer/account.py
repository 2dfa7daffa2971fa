"""The terms in which an operator describes its costs: kernels, messages, and tensors that stay in
memory.

An operator (`operator.py`) returns its costs as lists of kernels, messages and tensors.
`plan.cost.layer` computes the times of the kernels and messages on a cluster. `folds.py` adds up
the bytes of the tensors and messages.

The predicted time leaves out some small kernels (`priced` is False) and the host's time to launch
these kernels. These kernels count only in the number of launches (`LayerTimes.launches`). The time
of these kernels is already part of the predicted times of the other kernels, because the
efficiencies of the other kernels were fitted to published times of whole layers.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from ptdmpi.config.choices import RECOMPUTE_MODES


@dataclass(frozen=True)
class MatrixProduct:
    """`batch` matrix products of matrices [m, k] and [k, n], computed by `launches` kernels.
    `of_codes` is True if the operands are in 8-bit floating point with one scale for each matrix. A
    device with 8-bit matrix products can then multiply the codes directly."""

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
    """One or several kernels that mainly move data, so that their time depends only on
    `moved_bytes`, the number of bytes that they read and write.

    `launches` is the number of kernels that together move these bytes.
    """

    moved_bytes: float
    launches: int = 1
    priced: bool = True
    flops = 0.0


@dataclass(frozen=True)
class Elementwise:
    """Kernels that each process `elements` elements. `element_bytes` has, for each kernel, the
    number of bytes that it moves per element.

    `kind` is the name of the operation, for example "gelu" or "layernorm_backward". Under this
    name, a cluster file with measurements may have the operation's time per element.
    """

    kind: str
    elements: int
    element_bytes: tuple[float, ...]
    priced: bool = True
    flops = 0.0

    @property
    def launches(self) -> int:
        """Return the number of kernels that are launched, one for each entry of `element_bytes`."""
        return len(self.element_bytes)


@dataclass(frozen=True)
class FusedAttention:
    """Attention whose scores stay on chip, for `rows` queries with `columns` keys each.

    `products` is the number of matrix products: 2 in a forward and 5 in a backward (Dao et al.
    2022, arXiv 2205.14135, algorithm 4). If values have another head size than keys, `head_size` is
    the mean over the products. `seen` is the fraction of the causal scores that lie in the sliding
    window; only these scores take time.
    """

    rows: int
    columns: int
    head_size: float
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
# The phases of an operator: its forward and its backward. If backwards are split, there are two
# phases instead of "backward": "inputs" (I) computes the gradient of the input, and "weights" (W)
# computes the gradients of the weights.
Phase = Literal["forward", "backward", "inputs", "weights"]


@dataclass(frozen=True)
class Message:
    """A collective over an axis of the grid, which sends an activation or the gradient of an
    activation.

    `whole_bytes` is the size that `base.traffic` calls x: the bytes that a rank has before an
    all-reduce or a reduce-scatter, or after an all-gather. For an all-to-all, it is the bytes that
    a rank sends to other ranks. `behind` has the kernels that run at the same time as the message
    on clusters that overlap kernels and messages. `pieces` is the number of smaller messages into
    which Megatron-LM of 2021 splits this message; each of these messages has its own latency.
    `to_next` is True for an all-to-all in which each rank sends the whole tensor to the next rank.
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

    The modes of recomputation have the order none, selective, full. `kept_up_to` is the last mode
    that keeps the tensor from the forward to the backward.
    """

    name: str
    elements: int
    element_bytes: int
    kept_up_to: str = "selective"

    @property
    def bytes(self) -> int:
        """Return the number of bytes of the tensor on one rank."""
        return self.elements * self.element_bytes


def kept(items: Iterable[Item], mode: str) -> list[Item]:
    """Return the tensors in `items` that stay in memory until the backward pass under the
    recomputation mode `mode`."""
    rank = RECOMPUTE_MODES.index
    return [item for item in items if rank(mode) <= rank(item.kept_up_to)]


def total_bytes(items: Iterable[Item]) -> int:
    """Return the total bytes of the tensors in `items`."""
    return sum(item.bytes for item in items)
