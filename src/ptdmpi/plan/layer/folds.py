"""Parameters, FLOPs, messages and memory of a model. Each of these quantities is a sum or a maximum
over the model's operators.

Time is also a sum over operators, but it is computed in `plan.cost.layer`, because the times of
kernels depend on the machine.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from ptdmpi.config import ModelConfig
from ptdmpi.config.layout import ON_ONE_RANK, Dealing
from ptdmpi.plan.layer.account import Item, Message, Phase, kept, total_bytes
from ptdmpi.plan.layer.elementwise import Normalize
from ptdmpi.plan.layer.low_bit import CHUNK_BYTES, chunk_elements
from ptdmpi.plan.layer.operator import Operator
from ptdmpi.plan.layer.parts import Part
from ptdmpi.plan.layer.products import Multiply
from ptdmpi.plan.layer.sizes import Sizes
from ptdmpi.plan.layer.sublayer import Sublayer

Rows = Sequence[Operator]


def operators(sublayers: Iterable[Sublayer]) -> tuple[Operator, ...]:
    """Return the operators of a layer's sublayers, in the order of the forward."""
    return tuple(row for sublayer in sublayers for row in sublayer.operators)


def parts_of(rows: Iterable[Operator], dealing: Dealing = ON_ONE_RANK) -> dict[str, Part]:
    """Return the parts (linear layers, norms, tables and adapters) of the operators `rows`, trained
    or frozen, by name. If `dealing` distributes experts over ranks, the result has only the experts
    of the first rank."""
    parts: dict[str, Part] = {}
    for row in rows:
        parts |= row.held(dealing)
    return parts


def read_after(rows: Rows, name: str) -> bool:
    """Return True if an operator of `rows` reads the tensor `name` before another operator
    overwrites this tensor."""
    for row in rows:
        if name in row.inputs:
            return True
        if name in row.outputs:
            return False
    return False


# -- FLOPs ----------------------------------------------------------------------------------------


def multiplications(rows: Iterable[Operator], model: ModelConfig) -> float:
    """Return the number of multiplications per position in the forward matrix products of the
    operators `rows`."""
    return sum(row.multiplications(model) for row in rows)


def frozen_multiplications(rows: Iterable[Operator], model: ModelConfig) -> float:
    """Return the number of multiplications per position in those forward matrix products of the
    operators `rows` whose weights are frozen."""
    return sum(row.frozen_multiplications(model) for row in rows)


# -- messages -------------------------------------------------------------------------------------


def messages(
    rows: Iterable[Operator], sizes: Sizes, phase: Phase, input_trains: bool = True
) -> Iterator[Message]:
    """Yield the messages of the operators `rows` in one phase (forward, backward, or a part of a
    split backward).

    `input_trains` is True if something before these operators is trained, so that the first
    operator also computes the gradient of its input. If `input_trains` is False, only the operators
    after the first trained operator compute the gradients of their inputs.
    """
    for row, trains in with_inputs(rows, input_trains):
        yield from row.messages(sizes, phase, trains)


def with_inputs(
    rows: Iterable[Operator], input_trains: bool = True
) -> Iterator[tuple[Operator, bool]]:
    """Yield a pair for each operator: the operator, and True if its first input has a gradient.

    `input_trains` is True if the input of the first operator has a gradient. A value has a gradient
    if the operator that writes it is trained, or if an input of this operator has a gradient.
    """
    has_gradient: dict[str, bool] = {}
    for row in rows:
        inputs = [has_gradient.get(name, input_trains) for name in row.inputs]
        yield row, inputs[0]
        has_gradient |= dict.fromkeys(row.outputs, row.trains or any(inputs))


def recomputed(rows: Rows, sizes: Sizes) -> Rows:
    """Return the operators that full recomputation computes again. These are all operators up to
    the last one that keeps a tensor, because torch's checkpoint function stops the recomputation
    after the last kept tensor."""
    needed = [number for number, row in enumerate(rows, 1) if row.keeps_at_its_end(sizes)]
    return rows[: max(needed, default=0)]


# -- memory ---------------------------------------------------------------------------------------


def items(rows: Rows, sizes: Sizes, mode: str) -> list[Item]:
    """Return every tensor that a layer's backward needs. Not all of these tensors stay in memory
    from the forward to the backward: `account.kept` selects the tensors that stay in memory under a
    given mode of recomputation."""
    first = f"{rows[0].name}.input"
    tensors = [Item(first, sizes.local_tokens * sizes.model.hidden, sizes.compute_bytes, "full")]
    for row in rows:
        tensors += [item for item in row.kept(sizes, mode) if item.name != first]
    return tensors


def kept_bytes(rows: Iterable[Operator], sizes: Sizes) -> int:
    """Return the bytes of activations that the operators `rows` keep for their backward. The
    function is for the operators before the first layer or after the last layer, which are never
    recomputed."""
    return sum(total_bytes(row.kept(sizes, "none")) for row in rows)


def operand_bytes(rows: Iterable[Operator], sizes: Sizes) -> int:
    """Return the number of bytes of the operands that the operators `rows` keep in a split
    backward, from I (gradient of the input) to W (gradients of the weights)."""
    return sum(total_bytes(row.operands(sizes)) for row in rows)


def head_works(rows: Rows, sizes: Sizes) -> int:
    """Return the most bytes that the backward of the operators after the layers needs, in addition
    to the bytes that these operators keep.

    The backward runs from the last operator to the first. When it reaches a norm, the kept tensors
    of later operators, such as the logits, are counted as free. The operator directly after the
    norm is an exception: its kept tensors are counted as still in memory. In the backward of all
    other operators, all kept tensors are counted as still in memory."""
    works = 0
    freed = 0
    after = 0
    for row in reversed(rows):
        needed = row.backward_bytes(sizes)
        works = max(works, needed - freed if isinstance(row, Normalize) else needed)
        freed += after
        after = total_bytes(row.kept(sizes, "none"))
    return works


def adding_bytes(rows: Iterable[Operator], sizes: Sizes) -> int:
    """Return the most bytes that W (gradients of the weights) needs in addition to its operands.
    The result is a maximum over operators, because gradients are added to their sums one after the
    other."""
    return max((row.adding_bytes(sizes) for row in rows), default=0)


def idle_bytes(rows: Rows, sizes: Sizes) -> int:
    """Return the bytes that the forward of a layer without a backward needs. The result is the
    larger of two estimates, plus the bytes of a dequantized weight. The first estimate is the bytes
    of the tensors that the layer would keep if it had a backward. The second estimate is the bytes
    of the residual stream and of the inputs, outputs and copies of one operator."""
    most = max(row.forward_bytes(sizes) for row in rows) + sizes.boundary_bytes
    most = max(total_bytes(kept(items(rows, sizes, "none"), "none")), most)
    return most + _value_bytes(rows, sizes)


@dataclass(frozen=True)
class LayerBytes:
    """Bytes of one layer under a mode of recomputation, for one microbatch.

    `kept` is the bytes that stay in memory from the forward to the backward. `works` is the most
    bytes that the backward needs in addition to the bytes that this layer and earlier layers keep.
    `input_works` is the corresponding number for I, the part of a split backward that computes the
    gradient of the input. During I, the operands that later operators keep for W (gradients of the
    weights) are also in memory.
    """

    kept: int
    works: int
    input_works: int


def layer_bytes(sublayers: Sequence[Sublayer], sizes: Sizes, mode: str) -> LayerBytes:
    """Return the memory of a layer under recomputation `mode`. The largest memory during the
    layer's backward is found by visiting the operators from the last to the first.

    During the backward of an operator, the layer needs the working memory of this operator, the
    gradient of the residual stream, and the recomputed tensors. The tensors of later sublayers are
    already free. In the same sublayer, the inputs of later operators are also free. The input of
    the next operator is an exception: a gradient of the same size has replaced this input, so its
    memory is counted as still in use.
    """
    rows = operators(sublayers)
    tensors = items(rows, sizes, mode)
    whole = total_bytes(kept(tensors, mode))
    again = total_bytes(tensors) - whole
    stays = whole
    if mode == "full" and sizes.layout.partition_activations and sizes.layout.tensor > 1:
        # This rank keeps only its slice of the layer's input. For the recomputation, the whole
        # input is gathered.
        stays = whole // sizes.layout.tensor
        again += whole
    works = 0
    input_works = 0
    gone = 0
    operands = 0
    for sublayer in reversed(sublayers):
        last_input = _last_input(sublayer, sizes)
        for row, freed in _backwards(sublayer, sizes):
            present = again if mode == "full" or row.recomputed_selectively else 0
            held = present - gone + sizes.boundary_bytes - freed
            backward = row.backward_bytes(sizes)
            drawing = row.drawing_bytes(sizes) if row.recomputed_selectively else 0
            works = max(works, held + max(backward, drawing))
            redrawn = drawing if mode != "none" else 0
            needed = held + max(backward, redrawn) + operands + last_input
            input_works = max(input_works, needed)
        own = [item for row in sublayer.operators for item in row.kept(sizes, mode)]
        gone += total_bytes(own)
        operands += operand_bytes(sublayer.operators, sizes)
    if mode == "full":
        works = max(works, _redrawing_bytes(rows, sizes, again))
    values = _value_bytes(rows, sizes)
    return LayerBytes(stays, works + values, max(works, input_works) + values)


def _redrawing_bytes(rows: Rows, sizes: Sizes, again: int) -> int:
    """Return the most bytes that a full recomputation of a layer needs while it draws a dropout
    mask. `again` is the bytes of all tensors that are recomputed. When the mask of an operator is
    drawn, the tensors of later operators are not recomputed yet, so their bytes are subtracted."""
    most = 0
    later = 0
    for row in reversed(rows):
        if drawing := row.drawing_bytes(sizes):
            most = max(most, again - later + drawing)
        later += total_bytes(row.kept(sizes, "full"))
    return most


def _value_bytes(rows: Iterable[Operator], sizes: Sizes) -> int:
    """Return the bytes of the largest quantized weight after dequantization, plus the working
    memory of the dequantization; 0 if no weight is quantized."""
    products = [row for row in rows if isinstance(row, Multiply)]
    largest = max((row.quantized_elements(sizes) for row in products), default=0)
    return largest * sizes.compute_bytes + min(largest, chunk_elements(sizes.on_host)) * CHUNK_BYTES


def _backwards(sublayer: Sublayer, sizes: Sizes) -> Iterator[tuple[Operator, int]]:
    """Yield (operator, freed bytes) for each operator from the last to the first. The freed bytes
    are the kept inputs of later operators that are already free when the backward of this operator
    begins. The gradient of the next operator's input has replaced this input. If the gradient is
    larger than the input, the difference is subtracted from the freed bytes."""
    freed = 0
    after = 0
    excess = 0
    for row in reversed(sublayer.operators):
        yield row, freed - excess
        freed += after
        after = row.replaced_bytes(sizes)
        excess = row.excess_bytes(sizes)


def _last_input(sublayer: Sublayer, sizes: Sizes) -> int:
    """Return the bytes of the input of a sublayer's last linear layer. A split backward keeps this
    input as an operand until W (gradients of the weights)."""
    products = [row for row in sublayer.operators if isinstance(row, Multiply)]
    if not products:
        return 0
    name = f"{products[-1].name}.input"
    return total_bytes(item for item in products[-1].operands(sizes) if item.name == name)
