"""Descriptions of the parts of a model that hold parameters: linear layers, norms, tables and
adapters.

An operator names its parts (`operator.py`), and `ptdmpi.model` makes a module from each part. This
file does not import torch, so that parameters can be counted even if torch is not installed.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

Sees = Literal["positions", "heads", "all"]
Index = Annotated[int, 0]  # an integer from 0; all other integers of parts are sizes, from 1

# In a flat buffer, every parameter and every shard starts at a multiple of `ALIGNMENT` elements.
# Because of this, vectorised kernels compute every element with the same instructions, wherever it
# is, and need no scalar code for the last elements. The bits of an element therefore depend neither
# on the neighbouring elements nor on the rank that holds the element. For the same reason, norms of
# gradients are computed for rows of `ALIGNMENT` elements, which are never divided between two
# ranks.
ALIGNMENT = 256


@dataclass(frozen=True)
class Linear:
    """A linear layer, y = x W^T + b, with W of shape [sum(outputs), inputs].

    `split` is the dim that the tensor axis divides: "columns" divides each of the outputs (such as
    queries, keys and values), "rows" divides the inputs, and None means that every rank holds the
    whole matrix. `most` has, for each output, the largest number of slices into which the output
    can be divided. (An attention head is never cut.) If `most` is None, the number of slices has no
    limit. `init_std` is the standard deviation of the initial weights. `trains` is False for a
    frozen part, which has weights but no gradients, master weights or moments. If
    `partial_gradient` is True, each tensor-parallel rank computes only a summand of the gradient of
    W, and the bias has no gradient. If `shared_gradient` is True, each tensor-parallel rank
    multiplies only its own positions under sequence parallelism, and computes only a summand of the
    gradients of W and of the bias.
    """

    inputs: int
    outputs: tuple[int, ...]
    bias: bool
    init_std: float
    split: Literal["columns", "rows"] | None = None
    most: tuple[int, ...] | None = None
    trains: bool = True
    partial_gradient: bool = False
    shared_gradient: bool = False

    def local(self, tensor: int) -> tuple[int, int]:
        """Return (inputs, outputs) of one of `tensor` tensor-parallel ranks. If `tensor` does not
        divide the split dim, the quotient is rounded up."""
        if self.split == "rows":
            return -(-self.inputs // tensor), sum(self.outputs)
        parts = tensor if self.split == "columns" else 1
        most = self.most or (parts,) * len(self.outputs)
        shares = zip(self.outputs, most, strict=True)
        return self.inputs, sum(-(-part // min(parts, limit)) for part, limit in shares)

    def weights(self, tensor: int) -> Iterator[int]:
        """Yield the numbers of elements of W and of b on one of `tensor` tensor-parallel ranks.

        If the inputs are split, the bias is added after the sum over the ranks, so every rank has
        the whole bias.
        """
        inputs, outputs = self.local(tensor)
        yield inputs * outputs
        if self.bias:
            yield outputs

    def partial(self, sequence_parallel: bool) -> int:
        """Return the number of elements of W and b whose gradient must be summed over the tensor
        axis, because each tensor-parallel rank computes only a summand of it."""
        if self.partial_gradient:
            return self.inputs * sum(self.outputs)
        if self.shared_gradient and sequence_parallel:
            return sum(self.weights(1))
        adds_after_sum = self.split == "rows" and self.bias
        return sum(self.outputs) if sequence_parallel and adds_after_sum else 0

    def copied(self, tensor: int) -> Iterator[int]:
        """Yield the number of elements of each weight and bias that has fewer slices than there are
        tensor-parallel ranks, so that several neighbouring ranks hold the same slice. The number
        counts the whole weight once, without the copies. These are the weights of key or value
        heads that several tensor-parallel ranks share.
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
    """The weights of a norm: a scale of [size], and for LayerNorm also a shift.

    `sees` says which part of the input a tensor-parallel rank normalises: its own "positions"
    (under sequence parallelism), its own "heads", or "all" of the input. In the first two cases,
    each rank computes only a summand of the gradient.
    """

    size: int
    shift: bool
    trains: bool = True
    sees: Sees = "positions"

    def weights(self, tensor: int) -> Iterator[int]:
        """Yield the numbers of elements of the scale and of the shift, which every tensor-parallel
        rank has in full."""
        yield self.size
        if self.shift:
            yield self.size

    def partial(self, sequence_parallel: bool) -> int:
        """Return the number of elements of the norm whose gradient must be summed over the tensor
        axis, because each tensor-parallel rank computes only a summand of it."""
        if self.sees == "heads" or (self.sees == "positions" and sequence_parallel):
            return sum(self.weights(1))
        return 0

    def copied(self, tensor: int) -> Iterator[int]:
        """Yield nothing, because all tensor-parallel ranks have the same weights of a norm.
        (`copied` counts only slices that some of the ranks share.)"""
        yield from ()


@dataclass(frozen=True)
class Table:
    """A table whose rows [hidden size] are looked up. `split` is True if the tensor axis divides
    the rows, as in the table of the vocabulary."""

    rows: int
    hidden: int
    init_std: float
    split: bool = False
    trains: bool = True

    def weights(self, tensor: int) -> Iterator[int]:
        """Yield the number of elements on one of `tensor` tensor-parallel ranks, including padding
        if `tensor` does not divide the number of rows."""
        yield -(-self.rows // (tensor if self.split else 1)) * self.hidden

    def partial(self, sequence_parallel: bool) -> int:
        """Return the number of elements of the table whose gradient must be summed over the tensor
        axis, because each tensor-parallel rank computes only a summand of it."""
        return sum(self.weights(1)) if sequence_parallel and not self.split else 0

    def copied(self, tensor: int) -> Iterator[int]:
        """Yield nothing, because each row of a table is either on one tensor-parallel rank or on
        all of them."""
        yield from ()


@dataclass(frozen=True)
class LowRankPair:
    """A LoRA adapter: the product `scale` B A, which is added to the weight of a linear layer. If
    the linear layer has several outputs (such as queries and keys), the product is added only to
    the rows of the weight that compute one of them. A is [rank, inputs], and B is [outputs, rank]
    (Hu et al. 2021, arXiv 2106.09685, equation 3).

    `split` says how the tensor axis divides the linear layer (see `Linear`). "columns" divides the
    rows of B into at most `most` slices, and each tensor-parallel rank computes a summand of the
    gradient of A. "rows" divides the columns of A, and each rank computes a summand of the gradient
    of B. `dropout` is the dropout rate of the adapter's input. `number` is different for each
    adapter of a layer, so that each adapter has its own dropout mask. `output` is the index of the
    linear layer's output to which the adapter's output is added.
    """

    inputs: int
    outputs: int
    rank: int
    scale: float
    dropout: float
    number: Index
    output: Index
    split: Literal["columns", "rows"]
    most: int | None = None
    trains: bool = True

    def local(self, tensor: int) -> tuple[int, int]:
        """Return (inputs, outputs) of one of `tensor` tensor-parallel ranks. If `tensor` does not
        divide the split dim, the quotient is rounded up."""
        if self.split == "rows":
            return -(-self.inputs // tensor), self.outputs
        return self.inputs, -(-self.outputs // min(tensor, self.most or tensor))

    def weights(self, tensor: int) -> Iterator[int]:
        """Yield the numbers of elements of A and of B on one of `tensor` tensor-parallel ranks."""
        inputs, outputs = self.local(tensor)
        yield self.rank * inputs
        yield outputs * self.rank

    def partial(self, sequence_parallel: bool) -> int:
        """Return the number of elements whose gradient must be summed over the tensor axis: the
        elements of the matrix (A or B) that the tensor axis does not divide."""
        return self.rank * (self.inputs if self.split == "columns" else self.outputs)

    def copied(self, tensor: int) -> Iterator[int]:
        """Yield the number of elements of the whole B if neighbouring tensor-parallel ranks hold
        copies of the same slice of B."""
        if self.most is not None and tensor > self.most:
            yield self.outputs * self.rank


@dataclass(frozen=True)
class Scale:
    """An (IA)^3 adapter: a factor for each output channel of a linear layer, or, if its inputs are
    split, for each input channel (Liu et al. 2022, arXiv 2205.05638, section 3.3). The tensor axis
    divides the channels into at most `most` slices.

    If the linear layer has several outputs (such as queries and keys), `output` is the index of the
    output that is scaled.
    """

    size: int
    output: Index = 0
    most: int | None = None
    trains: bool = True

    def weights(self, tensor: int) -> Iterator[int]:
        """Yield the number of factors on one of `tensor` tensor-parallel ranks."""
        yield -(-self.size // min(tensor, self.most or tensor))

    def partial(self, sequence_parallel: bool) -> int:
        """Return 0, because each tensor-parallel rank computes the complete gradient of the factors
        of its channels."""
        return 0

    def copied(self, tensor: int) -> Iterator[int]:
        """Yield the number of all factors if neighbouring tensor-parallel ranks hold copies of the
        same slice."""
        if self.most is not None and tensor > self.most:
            yield self.size


Part = Linear | Norm | Table | LowRankPair | Scale
Parts = Mapping[str, Part]


def as_linear(part: Part, split: Literal["columns", "rows"] | None) -> Linear:
    """Return `part` if it is a linear layer with the split `split`; otherwise raise TypeError."""
    if not isinstance(part, Linear) or part.split != split:
        raise TypeError(f"{part} is not a linear layer with split = {split}")
    return part


def as_table(part: Part, split: bool) -> Table:
    """Return `part` if it is a table whose field `split` equals `split`; otherwise raise
    TypeError."""
    if not isinstance(part, Table) or part.split != split:
        raise TypeError(f"{part} is not a table with split = {split}")
    return part


def aligned(size: int) -> int:
    """Return the number of elements that a parameter of `size` elements occupies in a flat buffer,
    including padding."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def elements(parts: Iterable[Part], tensor: int = 1) -> int:
    """Return the number of elements of all `parts` on one of `tensor` tensor-parallel ranks."""
    return sum(sum(part.weights(tensor)) for part in parts)


def trained(parts: Iterable[Part]) -> list[Part]:
    """Return those of `parts` that are trained."""
    return [part for part in parts if part.trains]
