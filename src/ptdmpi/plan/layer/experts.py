"""Mixture of experts: several MLPs, of which a router chooses some for each token.

Shazeer et al. 2017 (arXiv 1701.06538), without capacities: a chosen expert computes all of its
tokens. If the tensor axis divides the width of each expert, all tensor ranks choose the same
experts. Each computes a summand of the outputs and of all gradients, including the gradient of the
router. The usual sums over the tensor axis add these summands. If experts are not divided, each
tensor rank chooses experts for 1/t of the positions, and these experts compute complete outputs.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ptdmpi.config import ModelConfig
from ptdmpi.config.layout import ON_ONE_RANK, Dealing
from ptdmpi.plan.layer.account import (
    Elementwise,
    Item,
    Kernel,
    MatrixProduct,
    MemoryPass,
    Message,
    Phase,
)
from ptdmpi.plan.layer.operator import Operator
from ptdmpi.plan.layer.parts import Linear, Part
from ptdmpi.plan.layer.products import copied_bytes, summed, weight_gradient
from ptdmpi.plan.layer.sizes import Sizes

INDEX_BYTES = 8  # an index of an expert or of a token
LOAD_BYTES = 8  # the number of tokens of an expert
# If experts are distributed over ranks, a rank has memory for this multiple of the mean number of
# rows (tokens of its experts).
FULLEST = 2
# Number of passes over the scores of all experts: for their softmax, the choice of experts, and the
# order of the tokens.
SCORE_PASSES = 4


@dataclass(frozen=True)
class MixExperts(Operator):
    """The weighted sum of the outputs of the experts that the router chooses for a token: [rows,
    hidden size] -> [rows, hidden size].

    If experts are distributed over e ranks, the time assumes that all experts have equally many
    tokens, so a rank computes as many rows as without expert parallelism. The memory is for
    `FULLEST` times this number of rows, or for the largest possible number of rows if that is
    smaller.

    `up` and `down` are the two linears of each of `count` experts, with the activation `function`
    between them. `chosen` is the number of experts of a token. If there are shared experts, their
    output is the second input, which is added to the sum. If the router has a bias, load balancing
    updates it in each step, and no gradient trains it. Under sequence parallelism the operator
    reads and writes "local" rows.
    """

    router: Linear
    up: Linear
    down: Linear
    count: int
    chosen: int
    function: str

    def expert(self, number: int) -> str:
        """Return the name of an expert."""
        return f"{self.name}.{number}"

    @property
    def router_name(self) -> str:
        """Return the name of the router."""
        return f"{self.name.rpartition('.')[0]}.router"

    def parts(self) -> dict[str, Part]:
        return self.held(ON_ONE_RANK)

    def held(self, dealing: Dealing) -> dict[str, Part]:
        parts: dict[str, Part] = {self.router_name: self.router}
        up, down = self.up, self.down
        if dealing.whole:
            up, down = replace(up, split=None), replace(down, split=None)
        for number in range(self.count // dealing.ranks):
            parts[f"{self.expert(number)}.up"] = up
            parts[f"{self.expert(number)}.down"] = down
        return parts

    def multiplications(self, model: ModelConfig) -> float:
        """Return the multiplications per token of the chosen experts and of the router."""
        each = self.up.inputs * sum(self.up.outputs) + self.down.inputs * sum(self.down.outputs)
        return self.router.inputs * self.count + self.chosen * each

    # -- sizes ------------------------------------------------------------------------------------

    def _tokens(self, sizes: Sizes) -> int:
        """Return the number of tokens for which a rank chooses experts."""
        return sizes.tokens // sizes.layout.dealing.tensor

    def _divided_by(self, sizes: Sizes) -> int:
        """Return the number of tensor ranks that divide the width of an expert."""
        return sizes.layout.tensor // sizes.layout.dealing.tensor

    def _pairs(self, sizes: Sizes) -> int:
        """Return the number of rows of all experts together: one row for each token and each of its
        experts. If experts are distributed over ranks, a rank has this number of rows on average,
        and they come from all ranks of its expert group."""
        return self._tokens(sizes) * self.chosen

    def _most_rows(self, sizes: Sizes) -> int:
        """Return the number of rows for which a rank has memory."""
        expert, pairs = sizes.layout.expert, self._pairs(sizes)
        if expert == 1:
            return pairs
        every = expert * self._tokens(sizes) * min(self.chosen, self.count // expert)
        return min(FULLEST * pairs, every)

    def _width(self, sizes: Sizes) -> int:
        """Return the width of an expert on one tensor rank."""
        return self.down.local(self._divided_by(sizes))[0]

    def _up_width(self, sizes: Sizes) -> int:
        """Return the number of outputs of an expert's first linear on one tensor rank."""
        return self.up.local(self._divided_by(sizes))[1]

    def _scores(self, sizes: Sizes) -> int:
        return self._tokens(sizes) * self.count

    def _groups(self, sizes: Sizes) -> tuple[int, int]:
        """Return (number of experts that have tokens, number of rows of each of these experts). The
        estimate assumes that these experts have equally many tokens."""
        pairs = self._pairs(sizes)
        used = min(self.count, pairs)
        return used, -(-pairs // used)

    def _products(self, sizes: Sizes, n: int, k: int) -> MatrixProduct:
        """Return the matrix products of each expert's rows [rows, k] with its matrix [k, n], one
        expert after the other."""
        used, rows = self._groups(sizes)
        return MatrixProduct(m=rows, n=n, k=k, batch=used, launches=used)

    # -- time -------------------------------------------------------------------------------------

    def _activated(self, sizes: Sizes, kind: str, numbers: int) -> Elementwise:
        """Return the kernels of an activation, one for each expert. They move `numbers` values for
        each row and each element of the expert's width."""
        used, rows = self._groups(sizes)
        moved = (numbers * sizes.compute_bytes,) * used
        return Elementwise(kind, rows * self._width(sizes), moved)

    def forward(self, sizes: Sizes) -> Iterator[Kernel]:
        c, h = sizes.compute_bytes, self.up.inputs
        pairs, width = self._pairs(sizes), self._width(sizes)
        used, _ = self._groups(sizes)
        yield MatrixProduct(self._tokens(sizes), self.count, h)
        yield MemoryPass(SCORE_PASSES * self._scores(sizes) * sizes.wide_bytes, SCORE_PASSES)
        if sizes.layout.expert > 1:  # rows are sorted by expert, results are added to tokens
            yield MemoryPass(5 * pairs * h * c, 1 + self.count)
        yield MemoryPass(2 * pairs * h * c, used)  # the rows of each expert are selected
        yield self._products(sizes, self._up_width(sizes), h)
        yield self._activated(sizes, self.function, len(self.up.outputs) + 1)
        yield MemoryPass(2 * pairs * width * c, used)  # rows are multiplied by their weights
        yield self._products(sizes, h, width)
        yield MemoryPass(3 * pairs * h * c, used)  # results are added to their tokens

    def backward(self, sizes: Sizes) -> Iterator[Kernel]:
        c, h = sizes.compute_bytes, self.up.inputs
        pairs, width = self._pairs(sizes), self._width(sizes)
        gates = len(self.up.outputs)
        used, _ = self._groups(sizes)
        if sizes.layout.expert > 1:
            yield MemoryPass(5 * pairs * h * c, 1 + self.count)
        yield MemoryPass(4 * pairs * h * c, 2 * used)  # selects inputs and output gradients
        yield self._products(sizes, width, h)
        # the activation is computed again, multiplied by the gradient, and the gradient is
        # multiplied by the weights
        yield self._activated(sizes, self.function, gates + 1)
        yield MemoryPass(6 * pairs * width * c, 3 * used)
        yield self._activated(sizes, f"{self.function}_backward", 2 * gates + 1)
        yield self._products(sizes, h, self._up_width(sizes))
        yield MemoryPass(3 * pairs * h * c, used)
        yield MemoryPass(SCORE_PASSES * self._scores(sizes) * sizes.wide_bytes, SCORE_PASSES)
        yield MatrixProduct(self._tokens(sizes), h, self.count)

    def weights(self, sizes: Sizes) -> Iterator[Kernel]:
        yield from weight_gradient(sizes, self.router.inputs, self.count, self._tokens(sizes))
        used, rows = self._groups(sizes)
        for linear in (self.up, self.down):
            inputs, outputs = linear.local(self._divided_by(sizes))
            yield from weight_gradient(sizes, inputs, outputs, rows, weights=used)
            if sizes.layout.expert > 1:  # the gradients are cleared, and added to the sum
                yield MemoryPass(4 * used * inputs * outputs * sizes.wide_bytes, 2 * used)

    def messages(self, sizes: Sizes, phase: Phase, input_trains: bool = True) -> Iterator[Message]:
        if phase == "weights":
            return
        yield from self._exchanges(sizes, phase)
        if sizes.layout.tensor == 1:
            return
        size = sizes.tokens * self.up.inputs * sizes.compute_bytes
        gathered = Message("all_gather", size)
        if sizes.layout.dealing.whole:
            if not sizes.divides_sequence:  # the output, or the gradient of the input
                yield gathered
            if phase == "forward" and self._counts_sequences(sizes):
                yield Message("all_reduce", self._sequence_loads(sizes) * LOAD_BYTES)
            return
        if phase == "forward":
            if sizes.divides_sequence:
                yield gathered
            yield summed(sizes, size)
            return
        if sizes.divides_sequence:  # gather the input again, and the gradient of the output
            yield gathered
            yield gathered
        yield summed(sizes, size)

    def _counts_sequences(self, sizes: Sizes) -> bool:
        """Return True if the balance loss needs the loads of the experts in each sequence."""
        return sizes.model.balance == "sequence"

    def _sequence_loads(self, sizes: Sizes) -> int:
        """Return the number of loads: one for each expert and each sequence of a microbatch."""
        return sizes.layout.micro_size * self.count

    def _exchanges(self, sizes: Sizes, phase: Phase) -> Iterator[Message]:
        """Yield the all-to-alls of tokens, if experts are distributed over ranks. The forward sends
        the counts of rows, the rows, their weights and the results. The backward sends the
        gradients of results, rows and weights. The sizes of these messages are means, because the
        number of rows that a rank sends depends on the experts that its tokens choose."""
        expert, pairs = sizes.layout.expert, self._pairs(sizes)
        if expert == 1:
            return
        rows = pairs * self.up.inputs * sizes.compute_bytes
        parts = [rows, rows, pairs * sizes.wide_bytes]
        if phase == "forward":
            parts.append(self.count * INDEX_BYTES)
        for part in parts:
            yield Message("all_to_all", part * (expert - 1) // expert, "expert")

    # -- memory -----------------------------------------------------------------------------------

    def kept(self, sizes: Sizes, mode: str) -> Iterator[Item]:
        """Yield the operator's input, the scores of the router, the outputs of the experts' first
        linears, and the chosen experts. No mode of recomputation chooses experts again."""
        pairs, rows = self._pairs(sizes), self._most_rows(sizes)
        if len(self.inputs) == 1:  # otherwise the shared experts' first linear keeps the input
            yield Item(f"{self.name}.input", self._input_elements(sizes), sizes.compute_bytes)
        yield Item(f"{self.name}.scores", self._scores(sizes), sizes.wide_bytes)
        yield Item(f"{self.name}.chosen", pairs, INDEX_BYTES, "full")
        if self._counts_sequences(sizes):
            yield Item(f"{self.name}.loads", self._sequence_loads(sizes), LOAD_BYTES, "full")
        yield Item(f"{self.name}.up", rows * self._up_width(sizes), sizes.compute_bytes)
        if sizes.layout.expert > 1:  # rows received from other ranks, and their weights
            yield Item(f"{self.name}.arrived", rows * self.up.inputs, sizes.compute_bytes)
            yield Item(f"{self.name}.weights", rows, sizes.wide_bytes)

    def _input_elements(self, sizes: Sizes) -> int:
        return sizes.local_tokens * self.up.inputs

    def operands(self, sizes: Sizes) -> Iterator[Item]:
        """Yield the rows of the experts and the gradients of these rows, at both linears, and the
        operands of the router."""
        c, wide, h = sizes.compute_bytes, sizes.wide_bytes, self.up.inputs
        width = 2 * h + self._width(sizes) + self._up_width(sizes)
        yield Item(f"{self.name}.rows", self._most_rows(sizes) * width, c)
        yield Item(f"{self.name}.scores_gradient", self._scores(sizes), wide)
        yield Item(f"{self.name}.wide_input", self._tokens(sizes) * h, wide)

    def replaced_bytes(self, sizes: Sizes) -> int:
        if len(self.inputs) > 1:
            return 0
        return self._input_elements(sizes) * sizes.compute_bytes

    def backward_bytes(self, sizes: Sizes) -> int:
        """Return the bytes of the gradient of the input, of gathered tensors, of the router's
        tensors, and of the tensors of one expert, which may have all tokens of the microbatch."""
        c, wide, h = sizes.compute_bytes, sizes.wide_bytes, self.up.inputs
        tokens = self._tokens(sizes)
        whole = tokens * h * (2 * c + (wide if wide > c else 0))
        if sizes.divides_sequence and not sizes.layout.dealing.whole:
            whole += 2 * tokens * h * c
        elif sizes.layout.dealing.whole:  # the gradient of the input is gathered
            whole += sizes.local_tokens * h * c
        scores = 8 * self._scores(sizes) * wide + 4 * self._pairs(sizes) * INDEX_BYTES
        expert = tokens * (3 * h + 4 * self._width(sizes) + 2 * self._up_width(sizes)) * c
        if wide > c:
            expert += tokens * self._width(sizes) * 2 * wide
        if sizes.layout.expert > 1:  # gradients of rows that are sent and received
            moved = self._most_rows(sizes) + self._pairs(sizes)
            whole += moved * (2 * h * c + INDEX_BYTES)
        return whole + scores + expert + self.adding_bytes(sizes)

    def adding_bytes(self, sizes: Sizes) -> int:
        """Return the number of bytes that the largest weight gradient of one expert needs until it
        is added to the sum, if the gradient and the sum have different types. The expert may have
        all tokens of the microbatch. If experts are distributed over ranks, each gradient is stored
        completely before it is added."""
        c, wide = sizes.compute_bytes, sizes.wide_bytes
        shape = self.up.local(self._divided_by(sizes))
        inputs, outputs = shape
        alone = inputs * outputs * wide * (sizes.layout.expert > 1)
        if wide == c:
            return alone
        return alone + max(
            copied_bytes(sizes, shape, self._tokens(sizes)), inputs * outputs * (c + wide)
        )
