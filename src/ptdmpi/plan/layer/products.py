"""Products with weights: a linear, its adapters, and the collectives of the tensor axis around it.

The column-parallel linears (f, g') and row-parallel linears (g) follow Shoeybi et al. 2019 (arXiv
1909.08053, section 3) and, under sequence parallelism, of Korthikanti et al. 2022 (arXiv
2205.05198, section 4.2.2): inputs are gathered before a column-parallel linear and outputs are
scattered after a row-parallel one.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from ptdmpi.config import ModelConfig
from ptdmpi.plan.layer.account import Item, Kernel, MatrixProduct, MemoryPass, Message, Phase
from ptdmpi.plan.layer.low_bit import LowBit, unpacking
from ptdmpi.plan.layer.operator import Operator, hash_bytes
from ptdmpi.plan.layer.parts import Linear, LowRankPair, Part, Scale
from ptdmpi.plan.layer.sizes import Rows, Sizes


@dataclass(frozen=True)
class Multiply(Operator):
    """A product with a weight: [rows, inputs] -> [rows, outputs], plus its adapters.

    Under sequence parallelism a column-parallel linear reads "local" rows and a row-parallel one
    writes them; `rows` are the rows of the product itself. `quantized` is the format of the weight
    that the product unpacks, or None for a weight that is not quantized. `shares_input`: its input
    is part of a tensor that another row keeps.
    """

    linear: Linear
    adapters: tuple[tuple[str, LowRankPair | Scale], ...] = ()
    rows: Rows = "whole"
    quantized: LowBit | None = None
    shares_input: bool = False

    def parts(self) -> dict[str, Part]:
        return {self.name: self.linear, **dict(self.adapters)}

    @cached_property
    def pairs(self) -> tuple[LowRankPair, ...]:
        """Return its low-rank adapters."""
        return tuple(part for _, part in self.adapters if isinstance(part, LowRankPair))

    @property
    def keeps_input(self) -> bool:
        """Return True if a gradient needs its input."""
        return self.linear.trains or bool(self.pairs)

    @property
    def is_column(self) -> bool:
        """Return True if the tensor axis divides its outputs."""
        return self.linear.split == "columns"

    def _rows_of_ends(self, sizes: Sizes) -> tuple[int, int]:
        """Return (number of rows of this rank's input before the collective, number of rows of its
        output after the collective)."""
        rows = sizes.rows(self.rows)
        if self.rows != "whole" or self.linear.split is None:
            return rows, rows
        if self.is_column:
            return sizes.local_tokens, rows
        return rows, sizes.local_tokens

    def multiplications(self, model: ModelConfig) -> float:
        weights = self.linear.inputs * sum(self.linear.outputs)
        return weights + sum(pair.rank * (pair.inputs + pair.outputs) for pair in self.pairs)

    def frozen_multiplications(self, model: ModelConfig) -> float:
        return 0.0 if self.linear.trains else self.linear.inputs * sum(self.linear.outputs)

    # -- time -------------------------------------------------------------------------------------

    def _matrices(self, sizes: Sizes) -> Iterator[tuple[int, int, bool]]:
        """Yield (inputs, outputs, True if it trains) of each matrix on this rank."""
        tensor = sizes.layout.tensor
        inputs, outputs = self.linear.local(tensor)
        if self.is_attention and sizes.gathers_early:
            # keys and values are gathered during the product of the queries, so they are computed
            # by another product
            yield inputs, outputs - sizes.query_width, self.linear.trains
            outputs = sizes.query_width
        yield inputs, outputs, self.linear.trains
        for pair in self.pairs:
            inputs, outputs = pair.local(tensor)
            yield inputs, pair.rank, True
            yield pair.rank, outputs, True

    def _unpacked(self, sizes: Sizes) -> Iterator[Kernel]:
        """Yield the kernels that unpack a frozen quantized weight, in every pass."""
        if self.quantized is None or self.linear.trains:
            return
        moved, launches = unpacking(
            self.quantized,
            self.linear.local(sizes.layout.tensor),
            sizes.compute_bytes,
            sizes.on_host,
        )
        yield MemoryPass(moved, launches)

    def forward(self, sizes: Sizes) -> Iterator[Kernel]:
        rows = sizes.rows(self.rows)
        yield from self._unpacked(sizes)
        for inputs, outputs, _ in self._matrices(sizes):
            yield MatrixProduct(rows, outputs, inputs)
        if self.linear.bias and self.is_column and not sizes.fused_attention and self.is_attention:
            # Megatron-LM of 2021 adds the bias of query, key and value in a separate kernel
            outputs = self.linear.local(sizes.layout.tensor)[1]
            yield MemoryPass(rows * outputs * 2 * sizes.compute_bytes)
        yield from self._added_bias(sizes)

    def _added_bias(self, sizes: Sizes) -> Iterator[Kernel]:
        """Yield the kernel that adds the bias after the sum over the tensor axis. It is not priced.
        Megatron-LM of 2021 adds the bias in the kernel of dropout and residual."""
        summed_before = self.linear.split == "rows" and sizes.layout.tensor > 1
        if self.linear.bias and summed_before and sizes.fused_attention:
            elements = self._rows_of_ends(sizes)[1] * sum(self.linear.outputs)
            yield MemoryPass(elements * 2 * sizes.compute_bytes, priced=False)

    @property
    def is_attention(self) -> bool:
        """Return True if its outputs are the heads of attention."""
        return self.linear.most is not None

    def backward(self, sizes: Sizes) -> Iterator[Kernel]:
        """Yield the kernels that compute the input's gradient and the sum for the bias's
        gradient."""
        rows = sizes.rows(self.rows)
        yield from self._unpacked(sizes)
        for inputs, outputs, _ in self._matrices(sizes):
            yield MatrixProduct(rows, inputs, outputs)
        if self.linear.bias and self.linear.trains:
            outputs = self.linear.local(sizes.layout.tensor)[1]
            yield MemoryPass(rows * outputs * sizes.compute_bytes)

    def weights(self, sizes: Sizes) -> Iterator[Kernel]:
        rows = sizes.rows(self.rows)
        for inputs, outputs, trains in self._matrices(sizes):
            if trains:
                yield from weight_gradient(sizes, inputs, outputs, rows)

    def messages(self, sizes: Sizes, phase: Phase, input_trains: bool = True) -> Iterator[Message]:
        if sizes.layout.tensor == 1 or self.linear.split is None or self.rows != "whole":
            return
        if self.is_column:
            yield from self._column_messages(sizes, phase, input_trains)
        else:
            yield from self._row_messages(sizes, phase, input_trains)

    def _column_messages(self, sizes: Sizes, phase: Phase, input_trains: bool) -> Iterator[Message]:
        inputs, outputs = self.linear.local(sizes.layout.tensor)
        rows = sizes.rows(self.rows)
        size = rows * inputs * sizes.compute_bytes
        gathers = sizes.divides_sequence
        if phase == "forward" and gathers:
            yield Message("all_gather", size)
        # the input is gathered again for the weights' gradients, during the input's gradient
        if phase == "backward" and gathers and self.keeps_input:
            yield Message("all_gather", size, behind=(MatrixProduct(rows, inputs, outputs),))
        if phase == "backward" and input_trains:
            yield summed(sizes, size, behind=(MatrixProduct(inputs, outputs, rows),))
        if phase == "inputs" and input_trains:
            yield summed(sizes, size)
        if phase == "weights" and gathers and self.keeps_input:
            yield Message("all_gather", size)

    def _row_messages(self, sizes: Sizes, phase: Phase, input_trains: bool) -> Iterator[Message]:
        size = sizes.rows(self.rows) * sum(self.linear.outputs) * sizes.compute_bytes
        if phase == "forward":
            yield summed(sizes, size)
        if not sizes.divides_sequence:
            return
        # a frozen linear needs the output's gradient only if a part before it trains
        if phase in ("backward", "inputs") and (input_trains or self.trains):
            yield Message("all_gather", size)
        if phase == "weights" and self.keeps_input:
            yield Message("all_gather", size)

    # -- memory -----------------------------------------------------------------------------------

    def kept(self, sizes: Sizes, mode: str) -> Iterator[Item]:
        if self.keeps_input and not self.shares_input:
            yield Item(f"{self.name}.input", self._input_elements(sizes), sizes.compute_bytes)
        for number, (_, part) in enumerate(self.adapters):
            # LoRA keeps its narrow product, and (IA)^3 keeps the values that it has multiplied
            if isinstance(part, LowRankPair):
                width = part.rank
            else:
                (width,) = part.weights(sizes.layout.tensor)
            rows = sizes.rows(self.rows)
            yield Item(f"{self.name}.adapter{number}", rows * width, sizes.compute_bytes)

    def keeps_at_its_end(self, sizes: Sizes) -> bool:
        """Return False also if the linear keeps only an input that an adapter scales before a
        row-parallel linear: this tensor is complete before the product and the sum."""
        return self.keeps_input or (bool(self.adapters) and self.is_column)

    def _input_elements(self, sizes: Sizes) -> int:
        return self._rows_of_ends(sizes)[0] * self.linear.local(sizes.layout.tensor)[0]

    def operands(self, sizes: Sizes) -> Iterator[Item]:
        """Yield the linear's input and its output's gradient. Under sequence parallelism only this
        rank's positions of the gathered tensor are kept. The bias's gradient is computed in I and
        waits there to be added."""
        c = sizes.compute_bytes
        outputs = self.linear.local(sizes.layout.tensor)[1]
        gradient = self._rows_of_ends(sizes)[1] * outputs
        if self.linear.trains:
            yield Item(f"{self.name}.input", self._input_elements(sizes), c)
            yield Item(f"{self.name}.gradient", gradient, c)
            if self.linear.bias:
                yield Item(f"{self.name}.bias", outputs, sizes.wide_bytes)
        if self.adapters:
            yield from self._operands_of_adapters(sizes, gradient)

    def _operands_of_adapters(self, sizes: Sizes, gradient: int) -> Iterator[Item]:
        """Yield the operands that all adapters share, and the narrow tensors of each."""
        c, rows = sizes.compute_bytes, sizes.rows(self.rows)
        if self.pairs:
            yield Item(f"{self.name}.input", self._input_elements(sizes), c)
            yield Item(f"{self.name}.gradient", gradient, c)
        for number, (_, part) in enumerate(self.adapters):
            if isinstance(part, LowRankPair):
                yield Item(f"{self.name}.adapter{number}", 2 * rows * part.rank, c)
            else:
                yield Item(f"{self.name}.scale{number}", rows * sum(part.weights(1)), c)
        if not self.pairs:
            # no additional tensor: a view of the output's gradient, or, if inputs are split, of the
            # input's gradient
            width = max(self.linear.local(sizes.layout.tensor))
            yield Item(f"{self.name}.gradient", rows * width, c)

    def replaced_bytes(self, sizes: Sizes) -> int:
        # the input of a frozen linear is freed after the forward if no gradient needs it
        if not (self.keeps_input or self.adapters or self.shares_input):
            return 0
        return self._input_elements(sizes) * sizes.compute_bytes

    def forward_bytes(self, sizes: Sizes) -> int:
        rows, shape = sizes.rows(self.rows), self.linear.local(sizes.layout.tensor)
        return rows * sum(shape) * sizes.compute_bytes + copied_bytes(sizes, shape, rows)

    def backward_bytes(self, sizes: Sizes) -> int:
        """Return the bytes of the input's gradient, and of the weight's gradient until it is added
        to `main_grad`.

        A column-parallel linear computes the input's gradient first; a row-parallel one computes
        the weight's gradient first.
        """
        result = linear_backward(
            sizes,
            self.linear.local(sizes.layout.tensor),
            sizes.rows(self.rows),
            adds_to_input=bool(self.pairs),
            weight_first=self.linear.split == "rows",
        )
        return result + self.gathered_bytes(sizes)

    def gathered_bytes(self, sizes: Sizes) -> int:
        """Return the bytes of the tensor that its backward gathers under sequence parallelism."""
        if not sizes.divides_sequence or self.linear.split is None or self.rows != "whole":
            return 0
        width = self.linear.inputs if self.is_column else sum(self.linear.outputs)
        return sizes.rows(self.rows) * width * sizes.compute_bytes

    def adding_bytes(self, sizes: Sizes) -> int:
        """Return the bytes needed to add the gradient of the weight or of the adapters, whichever
        is larger."""
        most = adding_bytes(sizes, self.linear) if self.linear.trains else 0
        c, wide = sizes.compute_bytes, sizes.wide_bytes
        for pair in self.pairs:
            # the gathered input, its copy after dropout, and the product in both types
            side = max(pair.local(sizes.layout.tensor))
            works = 3 * sizes.tokens * side * sizes.operand_bytes
            most = max(most, works + pair.rank * side * (c + wide))
        return most

    def quantized_elements(self, sizes: Sizes) -> int:
        """Return the number of elements of its quantized weight; 0 if it is not quantized."""
        return math.prod(self.linear.local(sizes.layout.tensor)) if self.quantized else 0


def summed(sizes: Sizes, size: int, behind: tuple[MatrixProduct, ...] = ()) -> Message:
    """Return the message that sums an activation over the tensor axis. Each rank receives the whole
    sum, or only the sum at its own positions."""
    if sizes.divides_sequence:
        return Message("reduce_scatter", size, behind=behind)
    return Message("all_reduce", size, behind=behind)


def weight_gradient(
    sizes: Sizes, inputs: int, outputs: int, rows: int, *, weights: int = 1
) -> Iterator[Kernel]:
    """Yield the product that computes a weight's gradient, and the kernel that adds it to the sum.
    Several `weights` of the same shape are computed one after the other.

    The adding kernel reads the product, and reads and writes the sum. It is not needed if the
    product is added to the sum by the product's own kernel, in the sum's type.
    """
    yield MatrixProduct(m=inputs, n=outputs, k=rows, batch=weights, launches=weights)
    e, g = sizes.compute_bytes, sizes.software.gradient_bytes
    if not (sizes.software.adds_in_place and e == g):
        yield MemoryPass(weights * inputs * outputs * (e + 2 * g), weights)


def copied_bytes(sizes: Sizes, shape: tuple[int, int], rows: int) -> int:
    """Return the bytes of a product's operands and result if half types are widened for the
    product; 0 if they are not. `shape` is (inputs, outputs) of the weight."""
    if sizes.operand_bytes == sizes.compute_bytes:
        return 0
    inputs, outputs = shape
    return (rows * (inputs + outputs) + inputs * outputs) * sizes.operand_bytes


def adding_bytes(sizes: Sizes, linear: Linear) -> int:
    """Return the bytes that are needed to add a weight's gradient, without its operands.

    They include the gathered part of the operands. If gradients are wider than weights, the product
    is counted in both types. If operands are widened for the product, the copies of the operands
    and of the result are counted instead.
    """
    c, rows = sizes.compute_bytes, sizes.tokens
    inputs, outputs = linear.local(sizes.layout.tensor)
    works = 0
    if linear.split is not None and sizes.local_tokens < sizes.tokens:
        works = rows * (inputs if linear.split == "columns" else outputs) * c
    if sizes.operand_bytes > c:
        works += copied_bytes(sizes, (inputs, outputs), rows)
    elif sizes.wide_bytes > c:
        works += inputs * outputs * (c + sizes.wide_bytes)
    return works


def linear_backward(
    sizes: Sizes,
    shape: tuple[int, int],
    rows: int,
    *,
    adds_to_input: bool = False,
    weight_first: bool = False,
) -> int:
    """Return the number of bytes that the backward of a linear with `shape` = (inputs, outputs)
    needs for `rows` rows.

    In half types this includes the weight's gradient and its float32 form, which is added to the
    sum. If operands are widened for the product, it includes copies of the operands and of the
    result instead. The gradients of the adapters of a frozen linear are added to the input's
    gradient (`adds_to_input`). `weight_first`: the weight's gradient is freed before the input's
    gradient is computed.
    """
    inputs, outputs = shape
    c, wide = sizes.compute_bytes, sizes.wide_bytes
    result = rows * inputs * c
    copies = copied_bytes(sizes, shape, rows)
    adapt = sizes.model.adapt
    if adapt.adapts:
        added = 0
        if adds_to_input:
            # one adapter after the other; with dropout also its mask and the masked input
            added = result
            if adapt.dropout > 0.0:
                added += hash_bytes(rows * inputs) + rows * inputs * (1 + c)
        return result + max(added, copies)
    if copies:
        return copies
    # the weight's gradient has a float32 copy only if gradients are summed in float32
    widened = wide if sizes.software.gradient_bytes >= wide else 0
    weight = inputs * outputs * (c + widened) if wide > c else 0
    return max(result, weight) if weight_first else result + weight
