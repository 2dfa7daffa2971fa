"""The operators before the first layer and after the last layer of a model: lookups, output head
and loss."""

from collections.abc import Iterator
from dataclasses import dataclass

from ptdmpi.config import ModelConfig
from ptdmpi.plan.layer.account import (
    Elementwise,
    Item,
    Kernel,
    MatrixProduct,
    MemoryPass,
    Message,
    Phase,
)
from ptdmpi.plan.layer.chunks import DEVICE_ELEMENTS
from ptdmpi.plan.layer.elementwise import MASK_BYTES
from ptdmpi.plan.layer.operator import Operator, weight_gradient
from ptdmpi.plan.layer.parts import Linear, Part, Table
from ptdmpi.plan.layer.products import (
    adding_bytes,
    linear_backward,
    summed,
)
from ptdmpi.plan.layer.sizes import Sizes


@dataclass(frozen=True)
class LookUp(Operator):
    """Token ids [positions, sequences] -> rows [positions, sequences, hidden size] of the
    vocabulary's table. Each tensor-parallel rank looks up the rows that it has, and the results are
    summed over the tensor axis."""

    table: Table

    def parts(self) -> dict[str, Part]:
        return {self.name: self.table}

    def forward(self, sizes: Sizes) -> Iterator[Kernel]:
        yield MemoryPass(sizes.tokens * self.table.hidden * 2 * sizes.compute_bytes)

    def backward(self, sizes: Sizes) -> Iterator[Kernel]:
        """Yield the passes that add the gradient of the table to the sum of gradients. A training
        program that adds gradients in place (`adds_in_place`) adds only the rows that were looked
        up. Any other program sets a gradient of the whole table to zero, fills it, and adds it."""
        if not self.table.trains:
            return
        e, g = sizes.compute_bytes, sizes.software.gradient_bytes
        if sizes.software.adds_in_place:
            yield MemoryPass(sizes.tokens * self.table.hidden * (e + 2 * g))
        else:
            yield MemoryPass(sum(self.table.weights(sizes.layout.tensor)) * 2 * (e + g))

    def messages(self, sizes: Sizes, phase: Phase, input_trains: bool = True) -> Iterator[Message]:
        if sizes.layout.tensor == 1:
            return
        size = sizes.tokens * self.table.hidden * sizes.compute_bytes
        if phase == "forward":
            yield summed(sizes, size)
        # A tensor-parallel rank has some rows of the table, and needs their gradients from all
        # positions. Under sequence parallelism, it therefore gathers the gradients at the positions
        # of other ranks.
        scatters = sizes.divides_sequence and sizes.software.adds_in_place
        if phase in ("backward", "weights") and scatters and self.table.trains:
            yield Message("all_gather", size)

    def kept(self, sizes: Sizes, mode: str) -> Iterator[Item]:
        if sizes.layout.tensor > 1:
            yield Item("embedding.ids", sizes.tokens, 8)
            yield Item("embedding.elsewhere", sizes.tokens, 1)

    def operands(self, sizes: Sizes) -> Iterator[Item]:
        """Yield the tensors that a split backward keeps until W (gradients of the weights): the
        gradient of the looked-up rows, and the kept tensors of the lookup."""
        size = sizes.local_tokens * self.table.hidden
        yield Item("embedding.gradient", size, sizes.compute_bytes)
        yield from self.kept(sizes, "none")


@dataclass(frozen=True)
class AddRows(Operator):
    """The sum of the activations x and rows of a small table. The rows are embeddings of positions
    or of token types."""

    table: Table
    by_position: bool = False

    def parts(self) -> dict[str, Part]:
        return {self.name: self.table}

    def operands(self, sizes: Sizes) -> Iterator[Item]:
        """Yield the gradient of the table of positions, which a split backward keeps until W
        (gradients of the weights). The gradient has the size of the whole table, even if only some
        rows of the table were added to x."""
        if self.by_position:
            yield Item(self.name, self.table.rows * self.table.hidden, sizes.compute_bytes)


@dataclass(frozen=True)
class DropEmbedding(Operator):
    """Dropout on the output of the embedding, [local rows, hidden size]. The kernel of the dropout
    also adds the embeddings of positions."""

    def forward(self, sizes: Sizes) -> Iterator[Kernel]:
        moved = 2 * sizes.compute_bytes + MASK_BYTES * sizes.software.dropout
        yield MemoryPass(sizes.local_tokens * sizes.model.hidden * moved)

    def kept(self, sizes: Sizes, mode: str) -> Iterator[Item]:
        if sizes.drops and not sizes.by_triton("dropout"):
            yield Item("embedding.mask", sizes.local_tokens * sizes.model.hidden, 1)


@dataclass(frozen=True)
class SelectPositions(Operator):
    """Activations [local rows, hidden size] -> activations at some positions of each sequence,
    [selected positions, hidden size]. Every tensor-parallel rank gets all selected positions.

    If `predicted` is True, the masked positions, whose tokens the head predicts, are selected. If
    `samples` is True, one position of each sequence is also selected. `has_backward` is True if an
    earlier operator is trained. `feeds_trained` is True if a trained linear layer reads the
    selected activations, so that they are kept.
    """

    predicted: bool
    samples: bool = True
    has_backward: bool = True
    feeds_trained: bool = True

    def messages(self, sizes: Sizes, phase: Phase, input_trains: bool = True) -> Iterator[Message]:
        if phase == "forward" and sizes.divides_sequence:
            yield Message("all_gather", sizes.tokens * sizes.model.hidden * sizes.compute_bytes)

    def _positions(self, sizes: Sizes) -> int:
        count = sizes.predicted if self.predicted else 0
        return count + (sizes.layout.micro_size if self.samples else 0)

    def kept(self, sizes: Sizes, mode: str) -> Iterator[Item]:
        """Yield the indices of the selected positions, and the activations at these positions. If
        the model classifies sequences, no indices are kept, because the batch itself has the index
        of the selected position of each sequence."""
        if not self.has_backward:
            return
        positions = self._positions(sizes)
        if self.predicted:
            yield Item("head.positions", positions, 8)
        if self.feeds_trained:
            yield Item("head.selected", positions * sizes.model.hidden, sizes.compute_bytes)


@dataclass(frozen=True)
class Predict(Operator):
    """Activations [predicted positions, hidden size] -> this tensor-parallel rank's logits
    [predicted positions, tokens of the vocabulary on this rank], with a soft cap if the model has
    one.

    `selected` is True if an earlier operator has selected the predicted positions, so that every
    tensor-parallel rank has all rows of the input. `shares_input` is True if the input is part of a
    tensor that another operator keeps.
    """

    linear: Linear
    selected: bool = False
    shares_input: bool = False

    def parts(self) -> dict[str, Part]:
        return {self.name: self.linear}

    def multiplications(self, model: ModelConfig) -> float:
        return self.linear.inputs * sum(self.linear.outputs)

    def _columns(self, sizes: Sizes) -> int:
        return self.linear.local(sizes.layout.tensor)[1]

    def _scaling(self, sizes: Sizes) -> Iterator[Kernel]:
        """Yield the pass that multiplies the input, or its gradient, by the factor of muP."""
        if sizes.model.width_ratio != 1.0:
            yield MemoryPass(sizes.local_tokens * self.linear.inputs * 2 * sizes.compute_bytes)

    def forward(self, sizes: Sizes) -> Iterator[Kernel]:
        yield from self._scaling(sizes)
        yield MatrixProduct(sizes.predicted, self._columns(sizes), self.linear.inputs)

    def backward(self, sizes: Sizes) -> Iterator[Kernel]:
        columns = self._columns(sizes)
        yield MatrixProduct(sizes.predicted, self.linear.inputs, columns)
        yield from self._scaling(sizes)
        # This pass over the gradient of the logits is for the gradient of the head's bias. A
        # decoder's head has no bias, but the pass is also counted for decoders, because it was
        # counted when the predictions were calibrated with published step times.
        if sizes.model.head_bias and self.linear.trains:
            yield MemoryPass(sizes.predicted * columns * sizes.compute_bytes)

    def weights(self, sizes: Sizes) -> Iterator[Kernel]:
        if self.linear.trains:
            columns = self._columns(sizes)
            yield from weight_gradient(sizes, self.linear.inputs, columns, sizes.predicted)

    def messages(self, sizes: Sizes, phase: Phase, input_trains: bool = True) -> Iterator[Message]:
        if sizes.layout.tensor == 1:
            return
        size = sizes.predicted * self.linear.inputs * sizes.compute_bytes
        if self.selected:
            if phase in ("backward", "inputs"):
                yield Message("all_reduce", size)
            return
        if phase == "forward" and sizes.divides_sequence:
            yield Message("all_gather", size)
        if phase in ("backward", "inputs"):
            yield summed(sizes, size)
        # the input is gathered again for the weight's gradient
        gathers = sizes.divides_sequence and self.linear.trains
        if gathers and phase in ("backward", "weights"):
            yield Message("all_gather", size)

    def kept(self, sizes: Sizes, mode: str) -> Iterator[Item]:
        c = sizes.compute_bytes
        if self.linear.trains and not self.shares_input:
            rows = sizes.predicted if self.selected else sizes.local_tokens
            yield Item("head.input", rows * self.linear.inputs, c)
        if sizes.model.logit_softcap:
            yield Item("head.tangents", sizes.predicted * self._columns(sizes), c)

    def operands(self, sizes: Sizes) -> Iterator[Item]:
        if not self.linear.trains:
            return
        c, columns = sizes.compute_bytes, self._columns(sizes)
        rows = sizes.predicted if self.selected else sizes.local_tokens
        yield Item("head.input", rows * self.linear.inputs, c)
        yield Item("head.gradient", sizes.predicted * columns, c)
        if self.linear.bias:
            yield Item("head.bias", columns, sizes.wide_bytes)

    def backward_bytes(self, sizes: Sizes) -> int:
        """Return the working bytes of the backward. For a program without FlashAttention
        (Megatron-LM of 2021) the result is 0: its published list of tensors (Korthikanti et al.
        2022) includes only the gradients of the loss."""
        if not sizes.fused_attention:
            return 0
        columns = self._columns(sizes)
        # the gradients with respect to the logits before and after the cap are in memory at the
        # same time
        uncapped = sizes.model.logit_softcap and sizes.predicted * columns * sizes.compute_bytes
        shape = (self.linear.inputs, columns)
        return linear_backward(sizes, shape, sizes.predicted) + int(uncapped)

    def adding_bytes(self, sizes: Sizes) -> int:
        return adding_bytes(sizes, self.linear) if self.linear.trains else 0


@dataclass(frozen=True)
class CrossEntropy(Operator):
    """This rank's logits [predicted positions, tokens of the vocabulary on this rank] and the
    labels -> the summed loss, in float32 or float64.

    `columns` is the size of the whole vocabulary. If `split` is False, the logits are [sequences,
    classes], `columns` is the number of classes, and every rank has all logits.
    """

    columns: int
    split: bool = True

    def _by_triton(self, sizes: Sizes) -> bool:
        return self.split and sizes.by_triton("loss")

    def _local_columns(self, sizes: Sizes) -> int:
        return sizes.share(self.columns) if self.split else self.columns

    def logits(self, sizes: Sizes) -> int:
        """Return the number of logits that this rank computes for one microbatch."""
        return sizes.rows("predicted" if self.split else "samples") * self._local_columns(sizes)

    def forward(self, sizes: Sizes) -> Iterator[Kernel]:
        """Yield the kernels of a softmax. They convert the logits to float32, compute the maximum
        of each row, subtract the maximum, take exponentials, add the exponentials up, and divide by
        this sum. The kernels of maximum and sum write only one number per row, which is not
        counted. A Triton kernel instead reads the logits once."""
        if self._by_triton(sizes):
            yield MemoryPass(self.logits(sizes) * sizes.compute_bytes)
            return
        e, w = sizes.compute_bytes, sizes.wide_bytes
        moved: tuple[float, ...] = (w, 2 * w, 2 * w, w, 2 * w)
        if e != w:
            moved = (e + w, *moved)
        yield Elementwise("loss", self.logits(sizes), moved)

    def backward(self, sizes: Sizes) -> Iterator[Kernel]:
        """Yield the kernels that compute the gradient of the logits in float32 and round it to the
        compute type. A Triton kernel instead overwrites the logits with the gradient."""
        if self._by_triton(sizes):
            yield MemoryPass(2 * self.logits(sizes) * sizes.compute_bytes)
            return
        e, w = sizes.compute_bytes, sizes.wide_bytes
        moved: tuple[float, ...] = (2 * w,)
        if e != w:
            moved = (*moved, e + w)
        yield Elementwise("loss_backward", self.logits(sizes), moved)

    def messages(self, sizes: Sizes, phase: Phase, input_trains: bool = True) -> Iterator[Message]:
        """Yield two messages over the tensor axis. The first has the maximum of the logits of each
        token. The second has the sum of exponentials and the logit of the label. Megatron-LM splits
        the second message into two."""
        if phase == "forward" and self.split and sizes.layout.tensor > 1:
            size = sizes.predicted * sizes.wide_bytes
            yield Message("all_reduce", size)
            yield Message("all_reduce", 2 * size, pieces=2)

    def kept(self, sizes: Sizes, mode: str) -> Iterator[Item]:
        """Yield the logits, and three numbers for each row: its largest logit, its sum of
        exponentials, and the weight of its token in the loss. Megatron-LM of 2021, and losses over
        classes, keep the probabilities in float32 instead."""
        logits = self.logits(sizes)
        if sizes.fused_attention and self.split:
            yield Item("loss.logits", logits, sizes.compute_bytes)
            yield Item("loss.statistics", 3 * sizes.predicted, sizes.wide_bytes)
        else:
            yield Item("loss.probabilities", logits, sizes.wide_bytes)
        # a Triton kernel reads the labels of the batch directly, so no labels are kept for it
        if self.split and not self._by_triton(sizes):
            yield Item("loss.labels", sizes.predicted, 8)
            yield Item("loss.here", sizes.predicted, 1)

    def backward_bytes(self, sizes: Sizes) -> int:
        """Return the bytes of the chunk of logits that is converted to float32 at a time. The
        gradient overwrites the logits. With a soft cap, the gradient is a separate tensor, whose
        bytes are added. A kernel in Triton needs no chunk. A loss over classes, and Megatron-LM of
        2021, convert all logits at once, so for them whole tensors are counted."""
        c, wide = sizes.compute_bytes, sizes.wide_bytes
        logits = self.logits(sizes)
        if not self.split:
            return logits * 2 * wide
        if not sizes.fused_attention:
            return logits * (wide + c) if c < wide else 0
        uncapped = logits * c if sizes.model.logit_softcap else 0
        if self._by_triton(sizes):
            return uncapped
        widened = wide * min(logits, DEVICE_ELEMENTS) if c < wide else 0
        return uncapped + widened


@dataclass(frozen=True)
class Tanh(Operator):
    """The tanh of BERT's pooler (Devlin et al. 2019), followed by dropout if the model classifies
    sequences: [sequences, hidden size] -> [sequences, hidden size]."""

    drops: bool = False

    def kept(self, sizes: Sizes, mode: str) -> Iterator[Item]:
        size, c = sizes.layout.micro_size * sizes.model.hidden, sizes.compute_bytes
        yield Item("sentence.pooler.output", size, c)
        if self.drops and sizes.model.dropout > 0.0:
            yield Item("sentence.mask", size, c + (not sizes.by_triton("dropout")))
