"""Matrix products with weights: a linear layer, its adapters, and the collectives of the tensor
axis before and after the linear layer.

Column-parallel and row-parallel linear layers are computed as in Shoeybi et al. 2019 (arXiv
1909.08053, section 3). Under sequence parallelism, they are computed as in Korthikanti et al. 2022
(arXiv 2205.05198, section 4.2.2): inputs are gathered before a column-parallel linear layer, and
outputs are scattered after a row-parallel one.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from ptdmpi.config import Layout, ModelConfig
from ptdmpi.config.precision import Scaling
from ptdmpi.plan.layer import low_bit
from ptdmpi.plan.layer.account import (
    Item,
    Kernel,
    MatrixProduct,
    MemoryPass,
    Message,
    Phase,
    total_bytes,
)
from ptdmpi.plan.layer.low_bit import LowBit, unpacking
from ptdmpi.plan.layer.operator import Operator, dropping_bytes, weight_gradient
from ptdmpi.plan.layer.parts import Linear, LowRankPair, Part, Scale
from ptdmpi.plan.layer.sizes import Rows, Sizes


@dataclass(frozen=True)
class Multiply(Operator):
    """A linear layer with its adapters: [rows, inputs] -> [rows, outputs].

    Under sequence parallelism, a column-parallel linear layer reads the rows of this rank's
    positions, and a row-parallel one writes these rows. `rows` says which rows the matrix product
    itself reads and writes (`sizes.Rows`). `quantized` is the format of a quantized weight
    (dequantized for each matrix product), or None. `scaling` is the kind of scales if the matrix
    products are in 8-bit floating point, and "none" if they have the type of the activations.
    `shares_input` is True if the input is part of a tensor that another operator keeps.
    `before_gelu` is True if the next operator is GELU, whose Triton kernels can add the bias and
    compute its gradient.
    """

    linear: Linear
    adapters: tuple[tuple[str, LowRankPair | Scale], ...] = ()
    rows: Rows = "whole"
    quantized: LowBit | None = None
    scaling: Scaling = "none"
    shares_input: bool = False
    before_gelu: bool = False

    def parts(self) -> dict[str, Part]:
        return {self.name: self.linear, **dict(self.adapters)}

    @cached_property
    def pairs(self) -> tuple[LowRankPair, ...]:
        """Return the LoRA adapters of the linear layer."""
        return tuple(part for _, part in self.adapters if isinstance(part, LowRankPair))

    @property
    def keeps_input(self) -> bool:
        """Return True if the gradient of a weight is computed from the input of the layer."""
        return self.linear.trains or bool(self.pairs)

    @property
    def keeps_codes(self) -> bool:
        """Return True if the 8-bit codes of the input are kept for the backward instead of the
        input. The codes are not kept if another operator keeps the input, or if the input is the
        input of the whole transformer layer. In these cases codes would only take additional
        memory."""
        return self.scaling != "none" and not self.shares_input and self.inputs != ("x",)

    @property
    def of_codes(self) -> bool:
        """Return True if a device may multiply the codes, because each matrix has one scale."""
        return self.scaling == "delayed"

    @property
    def is_column(self) -> bool:
        """Return True if the tensor axis divides the outputs of the linear layer."""
        return self.linear.split == "columns"

    def refuses(self, layout: Layout) -> str | None:
        return low_bit.cuts_blocks(self.linear, layout.tensor) if self.scaling == "block" else None

    def _rows_of_ends(self, sizes: Sizes) -> tuple[int, int]:
        """Return (number of rows of the input, number of rows of the output) on this rank. The
        input is counted before a gather, and the output after a scatter."""
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
        """Yield (inputs, outputs, True if the matrix is trained) for each matrix on this rank: the
        weight of the linear layer, and A and B of each low-rank adapter."""
        tensor = sizes.layout.tensor
        inputs, outputs = self.linear.local(tensor)
        if self.is_attention and sizes.gathers_early:
            # keys and values are gathered while the queries are computed, so a separate matrix
            # product computes keys and values
            yield inputs, outputs - sizes.query_width, self.linear.trains
            outputs = sizes.query_width
        yield inputs, outputs, self.linear.trains
        for pair in self.pairs:
            inputs, outputs = pair.local(tensor)
            yield inputs, pair.rank, True
            yield pair.rank, outputs, True

    def _unpacked(self, sizes: Sizes) -> Iterator[Kernel]:
        """Yield the kernels that dequantize a frozen quantized weight. The weight is dequantized
        anew in each forward and each backward."""
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
        yield from self._rounded(sizes, self._input_elements(sizes))
        yield from self._rounded(sizes, math.prod(self.linear.local(sizes.layout.tensor)))
        for inputs, outputs, _ in self._matrices(sizes):
            yield MatrixProduct(rows, outputs, inputs, of_codes=self.of_codes)
        if self.linear.bias and self.is_column and not sizes.fused_attention and self.is_attention:
            # Megatron-LM of 2021 adds the bias of query, key and value in a separate kernel
            outputs = self.linear.local(sizes.layout.tensor)[1]
            yield MemoryPass(rows * outputs * 2 * sizes.compute_bytes)
        yield from self._added_bias(sizes)

    def _added_bias(self, sizes: Sizes) -> Iterator[Kernel]:
        """Yield the kernel that adds the bias after the sum over the tensor axis. No time is
        counted for this kernel (`priced` is False), because the time of other kernels includes it.
        Megatron-LM of 2021 adds the bias in the kernel of dropout and residual instead."""
        summed_before = self.linear.split == "rows" and sizes.layout.tensor > 1
        if self.linear.bias and summed_before and sizes.fused_attention:
            elements = self._rows_of_ends(sizes)[1] * sum(self.linear.outputs)
            yield MemoryPass(elements * 2 * sizes.compute_bytes, priced=False)

    @property
    def is_attention(self) -> bool:
        """Return True if the outputs of the linear layer are queries, keys and values by head."""
        return self.linear.most is not None

    def backward(self, sizes: Sizes) -> Iterator[Kernel]:
        """Yield the kernels that compute the gradients of the input and of the bias."""
        rows, shape = sizes.rows(self.rows), self.linear.local(sizes.layout.tensor)
        yield from self._unpacked(sizes)
        yield from self._rounded(sizes, rows * shape[1])
        yield from self._rounded(sizes, math.prod(shape))
        for inputs, outputs, _ in self._matrices(sizes):
            yield MatrixProduct(rows, inputs, outputs, of_codes=self.of_codes)
        by_gelu = self.before_gelu and sizes.by_triton("gelu")
        if self.linear.bias and self.linear.trains and not by_gelu:
            yield MemoryPass(rows * shape[1] * sizes.compute_bytes)

    def weights(self, sizes: Sizes) -> Iterator[Kernel]:
        rows = sizes.rows(self.rows)
        if self.scaling != "none":
            if self.keeps_codes:
                yield low_bit.decoding(self._input_elements(sizes), sizes.compute_bytes)
            else:
                yield from self._rounded(sizes, self._input_elements(sizes))
            # with delayed scales, the codes of the input from the forward are used again
            for width in self.linear.local(sizes.layout.tensor)[self.scaling == "delayed" :]:
                yield from self._rounded(sizes, rows * width)
        for inputs, outputs, trains in self._matrices(sizes):
            if trains:
                yield from weight_gradient(sizes, inputs, outputs, rows, of_codes=self.of_codes)

    def _rounded(self, sizes: Sizes, elements: int) -> Iterator[Kernel]:
        """Yield the kernels that round an operand of `elements` elements to 8-bit floating point,
        if the matrix products are in 8-bit floating point."""
        if self.scaling != "none":
            yield low_bit.rounding(elements, sizes.compute_bytes, self.scaling)

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
        # the input is gathered again for the gradients of the weights, while the gradient of the
        # input is computed
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
        # If the linear layer is frozen and has no adapters, the gradient of its output is needed
        # only if something before it is trained.
        if phase in ("backward", "inputs") and (input_trains or self.trains):
            yield Message("all_gather", size)
        if phase == "weights" and self.keeps_input:
            yield Message("all_gather", size)

    # -- memory -----------------------------------------------------------------------------------

    def kept(self, sizes: Sizes, mode: str) -> Iterator[Item]:
        if self.keeps_input and not self.shares_input:
            yield from self._input_items(sizes)
        for number, (_, part) in enumerate(self.adapters):
            # LoRA keeps the product of A with the input, and (IA)^3 keeps the values that it scales
            if isinstance(part, LowRankPair):
                width = part.rank
            else:
                (width,) = part.weights(sizes.layout.tensor)
            rows = sizes.rows(self.rows)
            yield Item(f"{self.name}.adapter{number}", rows * width, sizes.compute_bytes)

    def keeps_at_its_end(self, sizes: Sizes) -> bool:
        """Return True if full recomputation must run this operator to its end: if a gradient needs
        the input of the linear layer, or if adapters scale its outputs. Adapters that scale the
        input need only the input, which is saved before the matrix product begins, so the operator
        need not run to its end for them."""
        return self.keeps_input or (bool(self.adapters) and self.is_column)

    def _input_items(self, sizes: Sizes) -> Iterator[Item]:
        """Yield the tensors from which the backward gets the input: the input itself, or its codes
        and their scales."""
        name = f"{self.name}.input"
        if self.keeps_codes:
            rows, width = self._rows_of_ends(sizes)[0], self.linear.local(sizes.layout.tensor)[0]
            yield from low_bit.codes_of_rows(name, rows, width, self.scaling)
        else:
            yield Item(name, self._input_elements(sizes), sizes.compute_bytes)

    def _input_elements(self, sizes: Sizes) -> int:
        return self._rows_of_ends(sizes)[0] * self.linear.local(sizes.layout.tensor)[0]

    def operands(self, sizes: Sizes) -> Iterator[Item]:
        """Yield the input of the linear layer, the gradient of its output, and the gradient of its
        bias. Under sequence parallelism, only this rank's positions of a gathered tensor are kept.
        The gradient of the bias is computed in I (gradient of the input) and added to its sum in W
        (gradients of the weights)."""
        c = sizes.compute_bytes
        outputs = self.linear.local(sizes.layout.tensor)[1]
        gradient = self._rows_of_ends(sizes)[1] * outputs
        if self.linear.trains:
            yield from self._input_items(sizes)
            yield Item(f"{self.name}.gradient", gradient, c)
            if self.linear.bias:
                yield Item(f"{self.name}.bias", outputs, sizes.wide_bytes)
        if self.adapters:
            yield from self._operands_of_adapters(sizes, gradient)

    def _operands_of_adapters(self, sizes: Sizes, gradient: int) -> Iterator[Item]:
        """Yield the operands that all adapters of the linear layer share, and the tensors of each
        adapter: the inner activation of a LoRA adapter and its gradient, or the values that an
        (IA)^3 adapter scales."""
        c, rows = sizes.compute_bytes, sizes.rows(self.rows)
        if self.pairs:
            yield Item(f"{self.name}.input", self._input_elements(sizes), c)
            yield Item(f"{self.name}.gradient", gradient, c)
        for number, (_, part) in enumerate(self.adapters):
            if isinstance(part, LowRankPair):
                yield Item(f"{self.name}.adapter{number}", 2 * rows * part.rank, c)
            else:
                width = sum(part.weights(sizes.layout.tensor))
                yield Item(f"{self.name}.scale{number}", rows * width, c)
        if not self.pairs:
            # all adapters are (IA)^3 adapters, which need the gradient of the values that they
            # scale: the output, or, if inputs are split, the input
            width = self.linear.local(sizes.layout.tensor)[self.is_column]
            yield Item(f"{self.name}.gradient", rows * width, c)

    def replaced_bytes(self, sizes: Sizes) -> int:
        # The input of a frozen linear layer is kept only if a gradient needs it, for example the
        # gradient of (IA)^3 scales that come before the linear layer.
        scales_input = bool(self.adapters) and not self.is_column
        if not (self.keeps_input or scales_input or self.shares_input):
            return 0
        if self.keeps_codes:
            return total_bytes(self._input_items(sizes))
        return self._input_elements(sizes) * sizes.compute_bytes

    def excess_bytes(self, sizes: Sizes) -> int:
        if not self.keeps_codes:
            return 0
        gradient = self._input_elements(sizes) * sizes.compute_bytes
        return gradient - self.replaced_bytes(sizes)

    def forward_bytes(self, sizes: Sizes) -> int:
        rows, shape = sizes.rows(self.rows), self.linear.local(sizes.layout.tensor)
        copies = copied_bytes(sizes, shape, rows)
        if self.scaling == "none":
            return rows * sum(shape) * sizes.compute_bytes + copies
        kept = total_bytes(self._input_items(sizes)) if self.keeps_codes else 0
        return kept + low_bit.scaled_forward_bytes(sizes, shape, rows, copies)

    def backward_bytes(self, sizes: Sizes) -> int:
        """Return the bytes of two gradients: of the input, and of the weight until its gradient is
        added to the sum of gradients.

        A row-parallel linear layer computes the gradient of the weight first, and any other linear
        layer computes the gradient of the input first. The result includes the bytes that the
        gradients of the adapters need.
        """
        if self.scaling != "none":
            shape, rows = self.linear.local(sizes.layout.tensor), sizes.rows(self.rows)
            first = self.linear.split != "rows"
            result = low_bit.scaled_backward_bytes(
                sizes, shape, rows, keeps_codes=self.keeps_codes, input_first=first
            )
            return result + self.gathered_bytes(sizes)
        result = linear_backward(
            sizes,
            self.linear.local(sizes.layout.tensor),
            sizes.rows(self.rows),
            adds_to_input=bool(self.pairs),
            weight_first=self.linear.split == "rows",
        )
        if self.pairs:
            result = self._backward_of_pairs(sizes, result)
        elif self.adapters:
            result = self._backward_of_scales(sizes, result)
        return result + self.gathered_bytes(sizes)

    def _backward_of_pairs(self, sizes: Sizes, linear: int) -> int:
        """Return the working bytes of the backward of a linear layer with low-rank adapters, if the
        linear layer itself needs `linear` bytes. The gradients of A and B are computed after the
        gradient of the input. At this time, the gradients of the inner activations A x of all
        adapters are in memory."""
        c, rows, tensor = sizes.compute_bytes, sizes.rows(self.rows), sizes.layout.tensor
        dx = rows * self.linear.local(tensor)[0] * c
        widened = sizes.wide_bytes * (c < sizes.wide_bytes)
        most = max(max(pair.weights(tensor)) for pair in self.pairs)
        gradient = most * (c + widened) * (c < sizes.wide_bytes)
        inner = rows * c * sum(pair.rank for pair in self.pairs)
        return max(linear, dx + gradient) + inner

    def _backward_of_scales(self, sizes: Sizes, linear: int) -> int:
        """Return the working bytes of the backward of a linear layer with (IA)^3 adapters, if the
        linear layer itself needs `linear` bytes.

        The backward of scales copies the gradient before it multiplies the copy by the scales.
        """
        c, rows = sizes.compute_bytes, sizes.rows(self.rows)
        inputs, outputs = self.linear.local(sizes.layout.tensor)
        products = self._scaled_bytes(sizes)
        # the scales come after the linear layer, so their backward comes first
        if self.is_column:
            return max(products, rows * outputs * c + linear)
        return max(linear, rows * inputs * c + max(products, rows * inputs * c))

    def _scaled_bytes(self, sizes: Sizes) -> int:
        """Return the bytes that the gradient of the widest (IA)^3 scale needs. The gradient is a
        sum over rows of elementwise products. The products are computed in float32 or float64. In
        fp16 and bf16, one operand is converted to float32; on a CPU, both operands are
        converted."""
        c, wide = sizes.compute_bytes, sizes.wide_bytes
        widths = [max(part.weights(sizes.layout.tensor)) for _, part in self.adapters]
        tensors = 1 if c == wide else 2 + sizes.on_host
        return sizes.rows(self.rows) * max(widths) * wide * tensors

    def gathered_bytes(self, sizes: Sizes) -> int:
        """Return the bytes of the tensor that the backward of the linear layer gathers under
        sequence parallelism."""
        if not sizes.divides_sequence or self.linear.split is None or self.rows != "whole":
            return 0
        width = self.linear.inputs if self.is_column else sum(self.linear.outputs)
        return sizes.rows(self.rows) * width * sizes.compute_bytes

    def adding_bytes(self, sizes: Sizes) -> int:
        """Return the bytes that are needed to add a gradient to the sum of gradients. The result is
        the maximum over the gradients of the weight and of the adapters."""
        if self.scaling != "none":
            shape, rows = self.linear.local(sizes.layout.tensor), sizes.rows(self.rows)
            result = low_bit.scaled_adding_bytes(sizes, shape, rows, keeps_codes=self.keeps_codes)
            return result + self.gathered_bytes(sizes)
        most = adding_bytes(sizes, self.linear) if self.linear.trains else 0
        c, wide = sizes.compute_bytes, sizes.wide_bytes
        for pair in self.pairs:
            # The working memory has the gradient in two types (the compute type and the type of the
            # sum), and three tensors of the size of the gathered input, one of them after dropout.
            side = max(pair.local(sizes.layout.tensor))
            works = 3 * sizes.tokens * side * sizes.operand_bytes
            most = max(most, works + pair.rank * side * (c + wide))
        if self.adapters and not self.pairs:
            most = max(most, self._scaled_bytes(sizes))
        return most

    def quantized_elements(self, sizes: Sizes) -> int:
        """Return the number of elements of the weight on this rank if it is quantized, else 0."""
        return math.prod(self.linear.local(sizes.layout.tensor)) if self.quantized else 0


def summed(sizes: Sizes, size: int, behind: tuple[MatrixProduct, ...] = ()) -> Message:
    """Return the message that sums an activation of `size` bytes over the tensor axis. Each rank
    receives the whole sum, or, under sequence parallelism, only the sum at its own positions."""
    if sizes.divides_sequence:
        return Message("reduce_scatter", size, behind=behind)
    return Message("all_reduce", size, behind=behind)


def copied_bytes(sizes: Sizes, shape: tuple[int, int], rows: int) -> int:
    """Return the bytes of the float32 copies of the operands and the result of a matrix product, if
    products in fp16 and bf16 are computed in float32; otherwise return 0. `shape` is (inputs,
    outputs) of the weight."""
    if sizes.operand_bytes == sizes.compute_bytes:
        return 0
    inputs, outputs = shape
    return (rows * (inputs + outputs) + inputs * outputs) * sizes.operand_bytes


def adding_bytes(sizes: Sizes, linear: Linear) -> int:
    """Return the bytes that are needed to compute the gradient of a weight and add it to the sum of
    gradients. Operands that this rank already has in memory are not counted.

    An operand that must be gathered from other ranks is counted. If gradients have a wider type
    than weights, the product is counted in both types, except with `Software.adds_wide`. If fp16
    and bf16 products are computed in float32, the float32 copies of the operands are counted
    instead, because the kernel adds the product directly to the sum.
    """
    c, rows = sizes.compute_bytes, sizes.tokens
    inputs, outputs = linear.local(sizes.layout.tensor)
    works = 0
    if linear.split is not None and sizes.local_tokens < sizes.tokens:
        works = rows * (inputs if linear.split == "columns" else outputs) * c
    if sizes.operand_bytes > c:
        works += rows * (inputs + outputs) * sizes.operand_bytes
    elif sizes.wide_bytes > c and not sizes.software.adds_wide:
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
    """Return the number of bytes that the backward of a linear layer with `shape` = (inputs,
    outputs) needs for `rows` rows.

    In fp16 and bf16 without `Software.adds_wide`, the bytes include the gradient of the weight and
    its float32 copy, or, with products in float32, copies of the operands and of the result. If
    `adds_to_input` is True, the adapters of a frozen linear layer add their gradients to the
    gradient of the input. If `weight_first` is True, the gradient of the weight is freed before
    the gradient of the input is computed.
    """
    inputs, outputs = shape
    c, wide = sizes.compute_bytes, sizes.wide_bytes
    result = rows * inputs * c
    copies = copied_bytes(sizes, shape, rows)
    adapt = sizes.model.adapt
    if adapt.adapts:
        # the adapters are computed one after the other; with dropout, an adapter also needs the
        # memory of its dropout
        added = result if adds_to_input else 0
        if adds_to_input and adapt.dropout > 0.0:
            added += dropping_bytes(rows * inputs, sizes)
        return result + max(added, copies)
    if copies:
        return copies
    # the weight's gradient has a float32 copy only if gradients are summed in float32
    each = c + wide * (sizes.software.gradient_bytes >= wide)
    weight = inputs * outputs * each * (wide > c and not sizes.software.adds_wide)
    return max(result, weight) if weight_first else result + weight
