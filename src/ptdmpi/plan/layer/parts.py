"""The parts of a model that hold parameters: linears, norms, tables and adapters, as data.

An operator names its parts (`operator.py`), and `ptdmpi.model` makes a module from each of them.
This file does not import torch, so parameters can be counted on a login node.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

Sees = Literal["positions", "heads", "all"]

# Every parameter and every shard starts at a multiple of this many elements. So vectorised kernels
# compute each element by the same instructions, wherever it is, and need no scalar code for the
# last elements. The bits of an element then depend neither on its neighbours nor on the rank that
# holds it. For the same reason norms are computed by rows of this length: a row is never divided
# between two ranks.
ALIGNMENT = 256


@dataclass(frozen=True)
class Linear:
    """y = x W^T + b, with W of shape [sum(outputs), inputs].

    `split` is the dim that the tensor axis divides. "columns" divides each of the outputs (such as
    q, k and v); "rows" divides the inputs; with None every rank holds all. `most` is the number of
    shares into which each of the outputs can be divided, because a head is never cut; None means t,
    the tensor-parallel size. `init_std` is the standard deviation of the initial weights. `trains`
    is False for a frozen part, which has weights but no gradients, masters or moments.
    `partial_gradient`: each tensor rank has a part of W's gradient, and a bias has none.
    """

    inputs: int
    outputs: tuple[int, ...]
    bias: bool
    init_std: float
    split: Literal["columns", "rows"] | None = None
    most: tuple[int, ...] | None = None
    trains: bool = True
    partial_gradient: bool = False

    def local(self, tensor: int) -> tuple[int, int]:
        """Return (inputs, outputs) of one tensor rank, padded where t does not divide them."""
        if self.split == "rows":
            return -(-self.inputs // tensor), sum(self.outputs)
        parts = tensor if self.split == "columns" else 1
        most = self.most or (parts,) * len(self.outputs)
        shares = zip(self.outputs, most, strict=True)
        return self.inputs, sum(-(-part // min(parts, limit)) for part, limit in shares)

    def weights(self, tensor: int) -> Iterator[int]:
        """Yield the numbers of elements of W and of b on one tensor rank.

        If the inputs are split, the bias is added after the sum, so every rank has the whole bias.
        """
        inputs, outputs = self.local(tensor)
        yield inputs * outputs
        if self.bias:
            yield outputs

    def partial(self, sequence_parallel: bool) -> int:
        """Return the number of elements whose gradient must be summed over the tensor axis."""
        if self.partial_gradient:
            return self.inputs * sum(self.outputs)
        adds_after_sum = self.split == "rows" and self.bias
        return sum(self.outputs) if sequence_parallel and adds_after_sum else 0

    def copied(self, tensor: int) -> Iterator[int]:
        """Yield the number of all elements of each weight of which neighbouring ranks hold copies.
        Such weights are key heads that serve the queries of several ranks.
        """
        if self.most is None:
            return
        for outputs, most in zip(self.outputs, self.most, strict=True):
            if tensor > most:
                yield outputs * self.inputs
                if self.bias:
                    yield outputs


@dataclass(frozen=True)
class Norm:
    """A scale of [size], and for LayerNorm also a shift.

    `sees` is the share of the input that each tensor rank normalises: its "positions" (under
    sequence parallelism), its "heads", or "all" of it. In the first two cases each rank has a part
    of the gradient.
    """

    size: int
    shift: bool
    trains: bool = True
    sees: Sees = "positions"

    def weights(self, tensor: int) -> Iterator[int]:
        """Yield the numbers of elements of the scale and of the shift, which every tensor rank has
        in full."""
        yield self.size
        if self.shift:
            yield self.size

    def partial(self, sequence_parallel: bool) -> int:
        """Return the number of elements whose gradient must be summed over the tensor axis."""
        if self.sees == "heads" or (self.sees == "positions" and sequence_parallel):
            return sum(self.weights(1))
        return 0

    def copied(self, tensor: int) -> Iterator[int]:
        """Yield nothing: all ranks have the same weights, and no rank has only a share."""
        yield from ()


@dataclass(frozen=True)
class Table:
    """Rows of [h] that are looked up; `split`: the tensor axis divides them (a vocabulary)."""

    rows: int
    hidden: int
    init_std: float
    split: bool = False
    trains: bool = True

    def weights(self, tensor: int) -> Iterator[int]:
        """Yield its number of elements on one tensor rank, including padding if t does not divide
        the rows."""
        yield -(-self.rows // (tensor if self.split else 1)) * self.hidden

    def partial(self, sequence_parallel: bool) -> int:
        """Return the number of elements whose gradient must be summed over the tensor axis."""
        return sum(self.weights(1)) if sequence_parallel and not self.split else 0

    def copied(self, tensor: int) -> Iterator[int]:
        """Yield nothing: either every row is on one rank, or all rows are on every rank."""
        yield from ()


@dataclass(frozen=True)
class LowRankPair:
    """`scale` B A, added to a linear or to one of its outputs: A is [rank, inputs], B [outputs,
    rank] (Hu et al. 2021, arXiv 2106.09685, equation 3).

    `split` is the split of the linear. "columns" divides the rows of B into at most `most` shares,
    and each tensor rank has a part of A's gradient. "rows" divides the columns of A, and each rank
    has a part of B's gradient. `dropout` is the rate at which inputs are dropped. `number`
    distinguishes the adapters of a layer. `output` is the index of the linear's output that the
    pair is added to.
    """

    inputs: int
    outputs: int
    rank: int
    scale: float
    dropout: float
    number: int
    output: int
    split: Literal["columns", "rows"]
    most: int | None = None
    trains: bool = True

    def local(self, tensor: int) -> tuple[int, int]:
        """Return (inputs, outputs) of one tensor rank, padded where t does not divide them."""
        if self.split == "rows":
            return -(-self.inputs // tensor), self.outputs
        return self.inputs, -(-self.outputs // min(tensor, self.most or tensor))

    def weights(self, tensor: int) -> Iterator[int]:
        """Yield the numbers of elements of A and of B on one tensor rank."""
        inputs, outputs = self.local(tensor)
        yield self.rank * inputs
        yield outputs * self.rank

    def partial(self, sequence_parallel: bool) -> int:
        """Return the number of elements whose gradient must be summed over the tensor axis: the
        elements of A or of B, whichever is not divided."""
        return self.rank * (self.inputs if self.split == "columns" else self.outputs)

    def copied(self, tensor: int) -> Iterator[int]:
        """Yield the number of elements of the whole B if neighbouring ranks hold copies of the same
        share of B."""
        if self.most is not None and tensor > self.most:
            yield self.outputs * self.rank


@dataclass(frozen=True)
class Scale:
    """A factor for each channel after a linear, or before a linear whose inputs are split (Liu et
    al. 2022, arXiv 2205.05638, section 3.3). The tensor axis divides the channels into at most
    `most` shares.

    `output`: the index of the linear's output that is scaled.
    """

    size: int
    output: int = 0
    most: int | None = None
    trains: bool = True

    def weights(self, tensor: int) -> Iterator[int]:
        """Yield its number of elements on one tensor rank."""
        yield -(-self.size // min(tensor, self.most or tensor))

    def partial(self, sequence_parallel: bool) -> int:
        """Return 0: each rank sees all positions of its channels."""
        return 0

    def copied(self, tensor: int) -> Iterator[int]:
        """Yield the number of all factors if neighbouring ranks hold copies of the same share."""
        if self.most is not None and tensor > self.most:
            yield self.size


Part = Linear | Norm | Table | LowRankPair | Scale
Parts = Mapping[str, Part]


def as_linear(part: Part, split: Literal["columns", "rows"] | None) -> Linear:
    """Return `part` if it is a linear with this `split`; raise TypeError if it is not."""
    if not isinstance(part, Linear) or part.split != split:
        raise TypeError(f"{part} is no linear split by {split}")
    return part


def as_table(part: Part, split: bool) -> Table:
    """Return `part` if it is a table with this `split`; raise TypeError if it is not."""
    if not isinstance(part, Table) or part.split != split:
        raise TypeError(f"{part} is no table with split = {split}")
    return part


def aligned(size: int) -> int:
    """Return the number of elements that a parameter of `size` elements takes in a flat buffer,
    including padding."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def elements(parts: Iterable[Part], tensor: int = 1) -> int:
    """Return the number of elements of all these parts on one of `tensor` tensor ranks."""
    return sum(sum(part.weights(tensor)) for part in parts)


def trained(parts: Iterable[Part]) -> list[Part]:
    """Return the parts that train."""
    return [part for part in parts if part.trains]
