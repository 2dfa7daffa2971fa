"""Mixtures of experts: layers with several MLPs (experts), of which a router chooses some for each
token.

The method is from Shazeer et al. 2017 (arXiv 1701.06538), but experts have no capacity limit: an
expert processes all tokens for which it is chosen. If the tensor axis divides the width of each
expert, all tensor-parallel ranks choose the same experts. Each tensor-parallel rank computes a
summand of the outputs and of all gradients, including the gradient of the router, and the usual
sums over the tensor axis add these summands. If experts are not divided, each of t tensor-parallel
ranks chooses experts for 1/t of the positions, and these experts compute complete outputs.
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
from ptdmpi.plan.layer.operator import Operator, weight_gradient
from ptdmpi.plan.layer.parts import Linear, LowRankPair, Part
from ptdmpi.plan.layer.products import copied_bytes, summed
from ptdmpi.plan.layer.sizes import Sizes

INDEX_BYTES = 8  # Bytes of the index of an expert or of a token.
LOAD_BYTES = 8  # Bytes of the number of tokens of an expert.
# Number of passes over the router's scores of all experts: for the softmax, the choice of experts,
# and the sorting of the tokens by expert.
SCORE_PASSES = 4


@dataclass(frozen=True)
class MixExperts(Operator):
    """The weighted sum of the outputs of the experts that the router chooses for a token: [rows,
    hidden size] -> [rows, hidden size].

    If experts are distributed over several ranks, the predicted time assumes that all experts have
    equally many tokens, so that a rank computes as many rows as without expert parallelism. The
    predicted memory is enough for `Software.fullest` times this number of rows, or for the largest
    possible number of rows if that is smaller. An expert computes all its rows together, or, if
    `Sizes.by_source` is True, the rows of each sending rank separately.

    `up` and `down` are the two linear layers of each of `count` experts, with the activation
    `function` between them. `chosen` is the number of experts that are chosen for a token. If there
    are shared experts, their output is the second input of the operator, and is added to the sum.
    If the router has a bias, load balancing updates the bias in each step, and no gradient trains
    it. Under sequence parallelism, the operator reads and writes only the rows of this rank's
    positions. `adapters` has the adapters of each expert as pairs ("name of the linear layer.name
    of the adapter", adapter). `shares_input` is True if the first linear layer of the shared
    experts already keeps the input of this operator for the backward.
    """

    router: Linear
    up: Linear
    down: Linear
    count: int
    chosen: int
    function: str
    adapters: tuple[tuple[str, LowRankPair], ...] = ()
    shares_input: bool = False

    def expert(self, number: int) -> str:
        """Return the name of the expert with the index `number`, for example "mlp.experts.0"."""
        return f"{self.name}.{number}"

    @property
    def router_name(self) -> str:
        """Return the name of the router's linear layer, for example "mlp.router"."""
        return f"{self.name.rpartition('.')[0]}.router"

    def parts(self) -> dict[str, Part]:
        return self.held(ON_ONE_RANK)

    def held(self, dealing: Dealing) -> dict[str, Part]:
        parts: dict[str, Part] = {self.router_name: self.router}
        own = self.of_expert()
        if dealing.whole:
            up, down = replace(self.up, split=None), replace(self.down, split=None)
            own |= {"up": up, "down": down}
        for number in range(self.count // dealing.ranks):
            parts |= {f"{self.expert(number)}.{name}": part for name, part in own.items()}
        return parts

    def of_expert(self) -> dict[str, Part]:
        """Return the parts of each expert by name: its two linear layers, each followed by its
        adapters."""
        parts: dict[str, Part] = {}
        for name, linear in (("up", self.up), ("down", self.down)):
            parts[name] = linear
            parts |= {row: pair for row, pair in self.adapters if row.startswith(f"{name}.")}
        return parts

    def pairs_of(self, linear: str) -> list[LowRankPair]:
        """Return the adapters of an expert's linear layer `linear`, which is "up" or "down"."""
        return [pair for name, pair in self.adapters if name.startswith(f"{linear}.")]

    @property
    def keeps_rows(self) -> bool:
        """Return True if a gradient of a parameter is computed from the experts' input rows, so
        that they must be available in the backward."""
        return self.up.trains or bool(self.pairs_of("up"))

    def multiplications(self, model: ModelConfig) -> float:
        """Return the number of multiplications per token in the router, and in the chosen experts
        with their adapters."""
        adapters = sum(pair.rank * (pair.inputs + pair.outputs) for _, pair in self.adapters)
        return self._of_base() + self.chosen * adapters

    def frozen_multiplications(self, model: ModelConfig) -> float:
        return 0.0 if self.up.trains else self._of_base()

    def _of_base(self) -> int:
        """Return the number of multiplications per token, without those of adapters."""
        each = self.up.inputs * sum(self.up.outputs) + self.down.inputs * sum(self.down.outputs)
        return self.router.inputs * self.count + self.chosen * each

    # -- sizes ------------------------------------------------------------------------------------

    def _tokens(self, sizes: Sizes) -> int:
        """Return the number of tokens for which the router of a rank chooses experts."""
        return sizes.tokens // sizes.layout.dealing.tensor

    def _divided_by(self, sizes: Sizes) -> int:
        """Return the number of tensor-parallel ranks among which the width of an expert is
        divided."""
        return sizes.layout.tensor // sizes.layout.dealing.tensor

    def _pairs(self, sizes: Sizes) -> int:
        """Return the number of rows of all experts on a rank: one row for each pair of a token and
        an expert that is chosen for it. If experts are distributed over ranks, a rank gets rows
        from all ranks of its expert group, and the result is the mean number of rows per rank of
        the group."""
        return self._tokens(sizes) * self.chosen

    def _most_rows(self, sizes: Sizes) -> int:
        """Return the number of rows for which memory is counted on a rank. If experts are
        distributed over ranks, the result is `Software.fullest` times the mean number of rows, or
        the largest possible number of rows if that is smaller."""
        expert, pairs = sizes.layout.expert, self._pairs(sizes)
        if expert == 1:
            return pairs
        every = expert * self._tokens(sizes) * min(self.chosen, self.count // expert)
        return min(sizes.software.fullest * pairs, every)

    def _width(self, sizes: Sizes) -> int:
        """Return the width of an expert on one tensor-parallel rank."""
        return self.down.local(self._divided_by(sizes))[0]

    def _up_width(self, sizes: Sizes) -> int:
        """Return the number of outputs of an expert's first linear layer on one tensor-parallel
        rank."""
        return self.up.local(self._divided_by(sizes))[1]

    def _scores(self, sizes: Sizes) -> int:
        return self._tokens(sizes) * self.count

    def _groups(self, sizes: Sizes) -> tuple[int, int]:
        """Return (number of segments, number of rows of a segment). A rank computes its segments
        one after the other. A segment has the rows of one of the rank's experts, or, if
        `sizes.by_source` is True, only those rows of the expert that come from one source rank. All
        segments are assumed to have equally many rows."""
        pairs = self._pairs(sizes)
        each = 1 if sizes.by_source else sizes.layout.expert
        used = min(self.count // each, pairs)
        return used, -(-pairs // used)

    def _largest_group(self, sizes: Sizes) -> int:
        """Return the largest number of rows that one segment (see `_groups`) may have. The
        predicted memory is enough for such a segment. In the worst case, all tokens of all source
        ranks choose the same expert."""
        return min(sizes.layout.expert * self._tokens(sizes), self._most_rows(sizes))

    def _adapting(self, sizes: Sizes, linear: str, *, back: bool = False) -> Iterator[Kernel]:
        """Yield the matrix products of the adapters of an expert's linear layer in the forward, or,
        if `back` is True, those that compute the gradient of the input in the backward."""
        for pair in self.pairs_of(linear):
            inputs, outputs = pair.local(self._divided_by(sizes))
            n, k = (pair.rank, outputs) if back else (outputs, pair.rank)
            yield self._products(sizes, n, k)
            n, k = (inputs, pair.rank) if back else (pair.rank, inputs)
            yield self._products(sizes, n, k)

    def _matrices(self, sizes: Sizes) -> Iterator[tuple[int, int]]:
        """Yield (inputs, outputs) of each trained matrix of an expert on one tensor-parallel
        rank."""
        tensor = self._divided_by(sizes)
        for name, linear in (("up", self.up), ("down", self.down)):
            if linear.trains:
                yield linear.local(tensor)
            for pair in self.pairs_of(name):
                inputs, outputs = pair.local(tensor)
                yield inputs, pair.rank
                yield pair.rank, outputs

    def _ranks(self, linear: str) -> int:
        """Return the sum of the LoRA ranks (inner sizes) of all adapters of an expert's linear
        layer."""
        return sum(pair.rank for pair in self.pairs_of(linear))

    def _products(self, sizes: Sizes, n: int, k: int) -> MatrixProduct:
        """Return the matrix products of each expert's rows [rows, k] with the expert's matrix [k,
        n]. The experts are computed one after the other."""
        used, rows = self._groups(sizes)
        return MatrixProduct(m=rows, n=n, k=k, batch=used, launches=used)

    # -- time -------------------------------------------------------------------------------------

    def _activated(self, sizes: Sizes, kind: str, numbers: int) -> Elementwise:
        """Return the kernels of the activation `kind`, one for each expert. Each kernel moves
        `numbers` values for each element of the [rows, width of the expert] output."""
        used, rows = self._groups(sizes)
        moved = (numbers * sizes.compute_bytes,) * used
        return Elementwise(kind, rows * self._width(sizes), moved)

    def forward(self, sizes: Sizes) -> Iterator[Kernel]:
        c, h = sizes.compute_bytes, self.up.inputs
        pairs, width = self._pairs(sizes), self._width(sizes)
        used, _ = self._groups(sizes)
        yield MatrixProduct(self._tokens(sizes), self.count, h)
        yield MemoryPass(SCORE_PASSES * self._scores(sizes) * sizes.wide_bytes, SCORE_PASSES)
        # With distributed experts, the received rows are sorted by expert, and results are added to
        # the outputs of their tokens.
        if sizes.layout.expert > 1:
            yield MemoryPass(5 * pairs * h * c, 1 + self.count)
        # for each expert, the rows of its tokens are selected
        yield MemoryPass(2 * pairs * h * c, used)
        yield self._products(sizes, self._up_width(sizes), h)
        yield from self._adapting(sizes, "up")
        yield self._activated(sizes, self.function, len(self.up.outputs) + 1)
        # the rows of each expert are multiplied by the router's weights
        yield MemoryPass(2 * pairs * width * c, used)
        yield self._products(sizes, h, width)
        yield from self._adapting(sizes, "down")
        yield MemoryPass(3 * pairs * h * c, used)  # the results are added to the outputs

    def backward(self, sizes: Sizes) -> Iterator[Kernel]:
        c, h = sizes.compute_bytes, self.up.inputs
        pairs, width = self._pairs(sizes), self._width(sizes)
        gates = len(self.up.outputs)
        used, _ = self._groups(sizes)
        if sizes.layout.expert > 1:
            yield MemoryPass(5 * pairs * h * c, 1 + self.count)
        # the rows of the output's gradient are selected, and, if the gradients of weights need
        # them, also the rows of the input
        selected = 1 + self.keeps_rows
        yield MemoryPass(2 * selected * pairs * h * c, selected * used)
        yield self._products(sizes, width, h)
        yield from self._adapting(sizes, "down", back=True)
        # The next two lines compute the activation again, multiply the activation by the gradient,
        # and multiply the gradient by the router's weights.
        yield self._activated(sizes, self.function, gates + 1)
        yield MemoryPass(6 * pairs * width * c, 3 * used)
        yield self._activated(sizes, f"{self.function}_backward", 2 * gates + 1)
        yield self._products(sizes, h, self._up_width(sizes))
        yield from self._adapting(sizes, "up", back=True)
        yield MemoryPass(3 * pairs * h * c, used)
        yield MemoryPass(SCORE_PASSES * self._scores(sizes) * sizes.wide_bytes, SCORE_PASSES)
        yield MatrixProduct(self._tokens(sizes), h, self.count)

    def weights(self, sizes: Sizes) -> Iterator[Kernel]:
        if self.router.trains:
            yield from weight_gradient(sizes, self.router.inputs, self.count, self._tokens(sizes))
        used, rows = self._groups(sizes)
        for inputs, outputs in self._matrices(sizes):
            yield from weight_gradient(sizes, inputs, outputs, rows, weights=used)
            # The gradient of each source rank has its own buffer, which is set to zero before the
            # gradient is computed. Afterwards the buffer is added to the sum.
            if sizes.by_source:
                yield MemoryPass(4 * used * inputs * outputs * sizes.wide_bytes, 2 * used)

    def messages(self, sizes: Sizes, phase: Phase, input_trains: bool = True) -> Iterator[Message]:
        if phase == "weights" or not (phase == "forward" or input_trains or self.trains):
            return
        yield from self._exchanges(sizes, phase, input_trains)
        if phase == "forward" and self._counts_sequences(sizes):
            yield from self._sums_loads(sizes)
        if sizes.layout.tensor == 1:
            return
        size = sizes.tokens * self.up.inputs * sizes.compute_bytes
        gathered = Message("all_gather", size)
        if sizes.layout.dealing.whole:
            # the output (forward) or the gradient of the input (backward) is gathered
            if not sizes.divides_sequence:
                yield gathered
            return
        if phase == "forward":
            if sizes.divides_sequence:
                yield gathered
            yield summed(sizes, size)
            return
        # the gradient of the output is gathered, and the input is gathered again
        if sizes.divides_sequence:
            yield gathered
            if self._keeps_input(sizes):
                yield gathered
        if input_trains:
            yield summed(sizes, size)

    def _counts_sequences(self, sizes: Sizes) -> bool:
        """Return True if a balance loss needs the loads (numbers of tokens) of the experts in each
        sequence."""
        return sizes.model.balance == "sequence" and self.router.trains

    def _sequence_loads(self, sizes: Sizes) -> int:
        """Return the number of loads: one for each expert and each sequence of a microbatch."""
        return sizes.layout.micro_size * self.count

    def _sums_loads(self, sizes: Sizes) -> Iterator[Message]:
        """Yield the messages that sum loads over the ranks that route other tokens of the same
        sequences. A load is the number of tokens of an expert."""
        size = self._sequence_loads(sizes) * LOAD_BYTES
        if sizes.layout.dealing.whole:
            yield Message("all_reduce", size)
        if sizes.layout.context > 1:
            yield Message("all_reduce", size, "context")

    def _keeps_input(self, sizes: Sizes) -> bool:
        """Return True if a gradient of a parameter is computed from this rank's input. If experts
        are distributed over ranks, the gradients of experts are computed from the rows that the
        rank has received instead."""
        return self.router.trains or (self.keeps_rows and sizes.layout.expert == 1)

    def _exchanges(self, sizes: Sizes, phase: Phase, input_trains: bool) -> Iterator[Message]:
        """Yield the all-to-alls of tokens, if experts are distributed over ranks. The forward sends
        the numbers of rows, the rows (activations of tokens), the weights of the rows, and the
        results of the experts. The backward sends the gradients of results, rows and weights. If
        nothing before the operator is trained, the backward sends only the gradients of results.
        The sizes of the messages are means, because the number of rows that a rank sends depends on
        the experts that the router chooses."""
        expert, pairs = sizes.layout.expert, self._pairs(sizes)
        if expert == 1:
            return
        rows = pairs * self.up.inputs * sizes.compute_bytes
        parts = [rows, rows, pairs * sizes.wide_bytes]
        if phase == "forward":
            parts.append(self.count * INDEX_BYTES)
        elif not input_trains:
            parts = [rows]
        for part in parts:
            yield Message("all_to_all", part * (expert - 1) // expert, "expert")

    # -- memory -----------------------------------------------------------------------------------

    def kept(self, sizes: Sizes, mode: str) -> Iterator[Item]:
        """Yield the operator's input, the scores of the router, the outputs of the experts' first
        linear layers, the inner activations of adapters, and the indices of the chosen experts. The
        indices are kept under every mode of recomputation, because experts are never chosen
        again."""
        pairs, rows = self._pairs(sizes), self._most_rows(sizes)
        if self._keeps_input(sizes) and not self.shares_input:
            yield Item(f"{self.name}.input", self._input_elements(sizes), sizes.compute_bytes)
        yield Item(f"{self.name}.scores", self._scores(sizes), sizes.wide_bytes)
        yield Item(f"{self.name}.chosen", pairs, INDEX_BYTES, "full")
        if self._counts_sequences(sizes):
            yield Item(f"{self.name}.loads", self._sequence_loads(sizes), LOAD_BYTES, "full")
        yield Item(f"{self.name}.up", rows * self._up_width(sizes), sizes.compute_bytes)
        # the rows that were received from other ranks, and their weights
        if sizes.layout.expert > 1:
            if self.keeps_rows:
                yield Item(f"{self.name}.arrived", rows * self.up.inputs, sizes.compute_bytes)
            yield Item(f"{self.name}.weights", rows, sizes.wide_bytes)
        if self.adapters:
            ranks = self._ranks("up") + self._ranks("down")
            yield Item(f"{self.name}.adapters", rows * ranks, sizes.compute_bytes)

    def _input_elements(self, sizes: Sizes) -> int:
        return sizes.local_tokens * self.up.inputs

    def operands(self, sizes: Sizes) -> Iterator[Item]:
        """Yield the operands of the weight gradients. For both linear layers of the experts, these
        are the input rows and the gradients of the output rows. The adapters and the router also
        have operands."""
        c, wide, h = sizes.compute_bytes, sizes.wide_bytes, self.up.inputs
        width = 2 * (self._ranks("up") + self._ranks("down"))
        if self.keeps_rows:
            width += h + self._up_width(sizes)
        if self.down.trains or self.pairs_of("down"):
            width += h + self._width(sizes)
        yield Item(f"{self.name}.rows", self._most_rows(sizes) * width, c)
        if not self.router.trains:
            return
        yield Item(f"{self.name}.scores_gradient", self._scores(sizes), wide)
        yield Item(f"{self.name}.wide_input", self._tokens(sizes) * h, wide)

    def replaced_bytes(self, sizes: Sizes) -> int:
        if self.shares_input or not self._keeps_input(sizes):
            return 0
        return self._input_elements(sizes) * sizes.compute_bytes

    def backward_bytes(self, sizes: Sizes) -> int:
        """Return the bytes of these tensors: the gradient of the input, gathered tensors, the
        router's tensors, and the tensors of one expert. In the worst case, this expert has all
        tokens of the microbatch."""
        c, wide, h = sizes.compute_bytes, sizes.wide_bytes, self.up.inputs
        tokens, most = self._tokens(sizes), self._largest_group(sizes)
        whole = tokens * h * (2 * c + (wide if wide > c else 0))
        if sizes.divides_sequence and not sizes.layout.dealing.whole:
            whole += 2 * tokens * h * c
        elif sizes.layout.dealing.whole:  # the gradient of the input is gathered
            whole += sizes.local_tokens * h * c
        scores = 8 * self._scores(sizes) * wide + 4 * self._pairs(sizes) * INDEX_BYTES
        width = (2 + self.keeps_rows) * h + 4 * self._width(sizes) + 2 * self._up_width(sizes)
        if self.adapters:  # the gradient of a linear layer's input, and what adapters add to it
            width += max(h, self._width(sizes)) + self._ranks("up") + self._ranks("down")
        expert = most * width * c
        if wide > c:
            expert += most * self._width(sizes) * 2 * wide
        if sizes.layout.expert > 1:  # the gradients of rows that are sent and received
            moved = self._most_rows(sizes) + self._pairs(sizes)
            whole += moved * (2 * h * c + INDEX_BYTES)
        copies = 0 if self.up.trains else copied_bytes(sizes, self._up_shape(sizes), most)
        return whole + scores + expert + max(copies, self.adding_bytes(sizes))

    def _up_shape(self, sizes: Sizes) -> tuple[int, int]:
        return self.up.local(self._divided_by(sizes))

    def adding_bytes(self, sizes: Sizes) -> int:
        """Return the number of bytes that the largest weight gradient of one expert needs until it
        is added to the sum of gradients. In the worst case, the expert has all tokens of the
        microbatch. If the gradient has the type of the sum, the matrix product adds it directly to
        the sum, and no bytes are needed. There is one exception: if an expert computes the tokens
        of each sending rank separately, each gradient is stored completely before it is added. The
        number of microbatches decides whether experts do so (`Layout.computes_by_source`). The
        prediction must be enough in both cases, so it counts these bytes in all layouts with
        distributed experts."""
        return max((self._adding(sizes, shape) for shape in self._matrices(sizes)), default=0)

    def _adding(self, sizes: Sizes, shape: tuple[int, int]) -> int:
        """Return the result of `adding_bytes` for a single matrix with `shape` = (inputs,
        outputs)."""
        c, wide = sizes.compute_bytes, sizes.wide_bytes
        inputs, outputs = shape
        alone = inputs * outputs * wide * (sizes.layout.expert > 1)
        if wide == c:
            return alone
        return alone + max(
            copied_bytes(sizes, shape, self._largest_group(sizes)), inputs * outputs * (c + wide)
        )
