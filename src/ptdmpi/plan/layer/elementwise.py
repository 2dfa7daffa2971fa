"""Operators that compute each element or each row separately: norms, activation functions, dropout
and residual sums."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from ptdmpi.plan.layer.account import Elementwise, Item, Kernel, MemoryPass
from ptdmpi.plan.layer.chunks import norm_programs
from ptdmpi.plan.layer.operator import Operator, hash_bytes
from ptdmpi.plan.layer.parts import Norm, Part
from ptdmpi.plan.layer.sizes import Rows, Sizes

MASK_BYTES = 1  # bytes of an element of a dropout mask


def norm_statistics(sizes: Sizes, name: str, rows: int) -> Item:
    """Return the statistics that a norm keeps for each row: mean and 1 / standard deviation for
    LayerNorm, or 1 / root mean square for RMSNorm."""
    if sizes.model.norm == "layernorm":
        return Item(f"{name}.statistics", 2 * rows, sizes.compute_bytes)
    return Item(f"{name}.statistics", rows, sizes.wide_bytes)


def norm_operands(sizes: Sizes, name: str, norm: Norm) -> Iterator[Item]:
    """Yield the gradients of a norm's weights. A split backward has two parts: I (gradient of the
    input) and W (gradients of the weights). The gradients of a norm's weights are computed in I and
    added to the sum of gradients in W, so they stay in memory from I to W."""
    if norm.trains:
        yield Item(f"{name}.weights", sum(norm.weights(sizes.layout.tensor)), sizes.compute_bytes)


def norm_backward(sizes: Sizes, elements: int) -> int:
    """Return the number of bytes that the backward of a norm of `elements` elements needs.

    If one kernel computes the whole backward, only the gradient of the input is needed. LayerNorm
    has such a kernel, and RMSNorm has one on GPUs if its weights have the type of the activations.
    Otherwise three tensors are computed in float32 or float64: the normalized input, the gradient
    multiplied by the weights, and the product of both. On a CPU, a product of two different types
    also needs a copy of its narrower operand. For a program without FlashAttention (Megatron-LM of
    2021) the result is 0: its published list of a layer's tensors (Korthikanti et al. 2022) does
    not include these tensors.
    """
    if not sizes.fused_attention:
        return 0
    model, c, wide = sizes.model, sizes.compute_bytes, sizes.wide_bytes
    is_fused = not (sizes.on_host or model.zero_centered_norm)
    if model.norm == "layernorm" or is_fused:
        return elements * c
    return elements * wide * (3 + (sizes.on_host and c < wide))


@dataclass(frozen=True)
class Normalize(Operator):
    """LayerNorm or RMSNorm over the last dim: [rows, hidden size] -> [rows, hidden size].

    `joins` is True if the input is also the residual, so that the gradient of the input is the sum
    of two gradients. `follows_sum` is True if this operator directly follows the residual sum that
    it normalizes; one Triton kernel can then compute both.
    """

    norm: Norm
    rows: Rows = "local"
    joins: bool = True
    follows_sum: bool = False

    def parts(self) -> dict[str, Part]:
        return {self.name: self.norm}

    def _elements(self, sizes: Sizes) -> int:
        return sizes.rows(self.rows) * self.norm.size

    def forward(self, sizes: Sizes) -> Iterator[Kernel]:
        """Yield one pass that reads the input and writes the output. If a Triton kernel computes
        the residual sum and the norm together, the launch of this kernel is counted by
        `AddResidual`, and only the additional write is counted here."""
        if sizes.by_triton("norm"):
            passes = 1 if self.follows_sum else 2
            moved = passes * self._elements(sizes) * sizes.compute_bytes
            yield MemoryPass(moved, launches=0 if self.follows_sum else 1)
            return
        yield Elementwise(sizes.model.norm, self._elements(sizes), (2 * sizes.compute_bytes,))

    def backward(self, sizes: Sizes) -> Iterator[Kernel]:
        """Yield the passes of the backward for output y and input x. One pass reads dy and x and
        writes dx. One pass reads dy and x to compute the gradients of the weights. If the input is
        also the residual (`joins`), a third pass adds the gradient of the residual to dx. If it is
        not, the first two passes are counted as one kernel."""
        if sizes.by_triton("norm"):
            yield from self._backward_by_triton(sizes)
            return
        e = sizes.compute_bytes
        moved = (3 * e, 2 * e, 3 * e) if self.joins else (5 * e,)
        yield Elementwise(f"{sizes.model.norm}_backward", self._elements(sizes), moved)

    def _backward_by_triton(self, sizes: Sizes) -> Iterator[Kernel]:
        """Yield the passes of the backward in Triton. One pass reads dy and x, and writes dx and
        partial sums of the weights' gradients. If the input is the residual stream, this pass also
        adds the gradient of the residual. Another pass adds up the partial sums. If the norm
        replaces the residual stream by its result, the gradient of the residual is added in a
        separate pass."""
        joins_here = self.joins and self.inputs != self.outputs
        e = self._elements(sizes) * sizes.compute_bytes
        sums = self._sums_bytes(sizes)
        yield MemoryPass((3 + joins_here) * e + sums)
        if sums:
            yield MemoryPass(sums)
        if self.joins and not joins_here:
            yield MemoryPass(3 * e)

    def _sums_bytes(self, sizes: Sizes) -> int:
        """Return the bytes of the partial sums of the weights' gradients that the Triton kernel
        writes."""
        if not self.norm.trains:
            return 0
        vectors = sum(self.norm.weights(sizes.layout.tensor))
        return norm_programs(sizes.rows(self.rows)) * vectors * sizes.wide_bytes

    def kept(self, sizes: Sizes, mode: str) -> Iterator[Item]:
        yield Item(f"{self.name}.input", self._elements(sizes), sizes.compute_bytes)
        if sizes.by_triton("norm"):
            numbers = (1 + self.norm.shift) * sizes.rows(self.rows)
            yield Item(f"{self.name}.statistics", numbers, sizes.wide_bytes)
            if sizes.model.zero_centered_norm:
                # The norm multiplies by 1 + weight, and keeps these factors.
                yield Item(f"{self.name}.gain", self.norm.size, sizes.wide_bytes)
            return
        # For a program without FlashAttention (Megatron-LM of 2021), the statistics of the norms in
        # layers are not counted, because the published list of its tensors (Korthikanti et al.
        # 2022, section 4.1) does not include them.
        if sizes.fused_attention or not self.joins:
            yield norm_statistics(sizes, self.name, sizes.rows(self.rows))
        if sizes.model.zero_centered_norm and sizes.fused_attention:
            # The norm multiplies by 1 + weight, and keeps these factors.
            yield Item(f"{self.name}.gain", self.norm.size, sizes.wide_bytes)

    def operands(self, sizes: Sizes) -> Iterator[Item]:
        yield from norm_operands(sizes, self.name, self.norm)

    def backward_bytes(self, sizes: Sizes) -> int:
        """Return the bytes that the backward of the norm needs (see `norm_backward`). In Triton,
        they are the bytes of the gradient of the input, and of the partial sums of the weights'
        gradients."""
        if sizes.by_triton("norm"):
            return self._elements(sizes) * sizes.compute_bytes + self._sums_bytes(sizes)
        return norm_backward(sizes, self._elements(sizes))


@dataclass(frozen=True)
class Activate(Operator):
    """GELU or another activation: [rows, `gates` x width] -> [rows, width]. With two gates, the
    activation of the first gate is multiplied by the second gate (Shazeer 2020, arXiv 2002.05202).

    `width` is the width of the output on all tensor-parallel ranks together. `split` is True if the
    tensor axis divides this width. `bias` says whether Triton kernels can also add the bias of the
    linear layer before GELU: "none" if they cannot, "frozen" if they can, and "trains" if they also
    compute the gradient of the bias.
    """

    function: str
    width: int
    gates: int = 1
    rows: Rows = "whole"
    split: bool = True
    bias: Literal["none", "frozen", "trains"] = "none"

    def _local_width(self, sizes: Sizes) -> int:
        return sizes.share(self.width) if self.split else self.width

    def _elements(self, sizes: Sizes) -> int:
        return sizes.rows(self.rows) * self._local_width(sizes)

    def _sums_bytes(self, sizes: Sizes) -> int:
        """Return the bytes of the partial sums of the bias's gradient that a Triton kernel
        writes."""
        if self.bias != "trains" or not sizes.by_triton("gelu"):
            return 0
        return norm_programs(sizes.rows(self.rows)) * self._local_width(sizes) * sizes.wide_bytes

    def _priced_elements(self, sizes: Sizes) -> int:
        """Return the number of elements from which the computing time is predicted. If the
        tensor-parallel size does not divide the width, the width is padded, but the time of the
        padding is not counted."""
        width = self.width // sizes.layout.tensor if self.split else self.width
        return sizes.rows(self.rows) * width

    def forward(self, sizes: Sizes) -> Iterator[Kernel]:
        moved = (self.gates + 1) * sizes.compute_bytes
        yield Elementwise(self.function, self._priced_elements(sizes), (moved,))

    def backward(self, sizes: Sizes) -> Iterator[Kernel]:
        """Yield one pass that reads the inputs and the gradient of the output, and writes the
        gradients of the inputs. If Triton kernels also compute the gradient of the bias, this pass
        writes partial sums, and a second pass adds them up."""
        moved = (2 * self.gates + 1) * sizes.compute_bytes
        if sums := self._sums_bytes(sizes):
            yield MemoryPass(self._elements(sizes) * moved + sums)
            yield MemoryPass(sums)
            return
        yield Elementwise(f"{self.function}_backward", self._priced_elements(sizes), (moved,))

    def kept(self, sizes: Sizes, mode: str) -> Iterator[Item]:
        yield Item(f"{self.name}.input", self.gates * self._elements(sizes), sizes.compute_bytes)

    def replaced_bytes(self, sizes: Sizes) -> int:
        return self.gates * self._elements(sizes) * sizes.compute_bytes

    def backward_bytes(self, sizes: Sizes) -> int:
        """Return the bytes of the gradient of the input and, with two gates, of the product of both
        gates, which the Triton kernel does not need. Under sequence parallelism, the gathered
        gradient of the next linear layer's output is still in memory, so its bytes are added. The
        bytes of the partial sums of the bias's gradient are also added."""
        size = self.gates * self._elements(sizes)
        if self.gates == 2 and not sizes.by_triton("gated"):
            size += self._elements(sizes)
        if self.split and sizes.local_tokens < sizes.tokens:
            size += sizes.tokens * sizes.model.hidden
        return size * sizes.compute_bytes + self._sums_bytes(sizes)


def fused_dropout(elements: int, sizes: Sizes) -> Iterator[Kernel]:
    """Yield the pass of the Triton kernel for dropout, if the training program uses this kernel.
    The kernel reads and writes each element once, forward and backward, and stores no mask."""
    if sizes.model.dropout > 0.0 and sizes.by_triton("dropout"):
        yield MemoryPass(2 * elements * sizes.compute_bytes)


@dataclass(frozen=True)
class AddResidual(Operator):
    """x + dropout(y), or x + y without dropout; x and y are [rows, hidden size].

    `mask` is the name of the dropout mask among the kept tensors, and `place` is the number of this
    mask in the layer.
    """

    mask: str
    place: int
    rows: Rows = "local"

    def _elements(self, sizes: Sizes) -> int:
        return sizes.rows(self.rows) * sizes.model.hidden

    def forward(self, sizes: Sizes) -> Iterator[Kernel]:
        """Yield one pass that reads the sublayer's output and the residual, and writes their sum
        and, with dropout, the mask."""
        moved = 3 * sizes.compute_bytes + MASK_BYTES * sizes.software.dropout
        yield MemoryPass(self._elements(sizes) * moved)
        yield from fused_dropout(self._elements(sizes), sizes)

    def backward(self, sizes: Sizes) -> Iterator[Kernel]:
        """Yield the pass of dropout's backward. Without dropout, both terms get the gradient of the
        sum unchanged, so there is no pass."""
        if sizes.software.dropout:
            yield MemoryPass(self._elements(sizes) * (2 * sizes.compute_bytes + MASK_BYTES))
        yield from fused_dropout(self._elements(sizes), sizes)

    def kept(self, sizes: Sizes, mode: str) -> Iterator[Item]:
        if sizes.drops and not sizes.by_triton("dropout"):
            yield Item(self.mask, self._elements(sizes), 1)

    def backward_bytes(self, sizes: Sizes) -> int:
        """Return the bytes of two gradients: the gradient of the sum, and the gradient of y, which
        is the first gradient times the dropout mask. A CPU also makes a copy of the mask in the
        type of the gradient. The result is 0 without dropout. The result is also 0 for a program
        without FlashAttention (Megatron-LM of 2021), because its published list of tensors does not
        include these gradients."""
        if not sizes.drops or not sizes.fused_attention:
            return 0
        return (2 + sizes.on_host) * self._elements(sizes) * sizes.compute_bytes

    def drawing_bytes(self, sizes: Sizes) -> int:
        """Return the number of bytes that are needed to draw the dropout mask. Drawing needs the
        hashes from which the mask is computed, and two tensors as large as the sublayer's output. A
        kernel in Triton needs only one such tensor, and no hashes."""
        if not sizes.drops:
            return 0
        local = self._elements(sizes)
        if sizes.by_triton("dropout"):
            return local * sizes.compute_bytes
        return hash_bytes(local) + 2 * local * sizes.compute_bytes
