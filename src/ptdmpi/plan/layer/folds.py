"""Parameters, FLOPs, messages and memory of a model, each as a sum or a maximum over its operators.

Time is also a sum over operators. It is in `plan.cost.layer`, because it needs a machine that
prices kernels.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from ptdmpi.config import ModelConfig
from ptdmpi.plan.layer.account import Item, Message, Phase, kept, total_bytes
from ptdmpi.plan.layer.describe import Sublayer
from ptdmpi.plan.layer.low_bit import CHUNK_BYTES, chunk_elements
from ptdmpi.plan.layer.operator import Operator
from ptdmpi.plan.layer.parts import Part
from ptdmpi.plan.layer.products import Multiply
from ptdmpi.plan.layer.sizes import Sizes

Rows = Sequence[Operator]


def operators(sublayers: Iterable[Sublayer]) -> tuple[Operator, ...]:
    """Return the rows of a layer, in the order of its forward."""
    return tuple(row for sublayer in sublayers for row in sublayer.operators)


def parts_of(rows: Iterable[Operator], expert: int = 1) -> dict[str, Part]:
    """Return the parts of these rows with weights, trained or frozen, by name. If experts are
    distributed over `expert` ranks, the result has the experts of the first rank only."""
    parts: dict[str, Part] = {}
    for row in rows:
        parts |= row.held(expert)
    return parts


# -- FLOPs ----------------------------------------------------------------------------------------


def multiplications(rows: Iterable[Operator], model: ModelConfig) -> float:
    """Return the multiplications per position of the forward products of these operators."""
    return sum(row.multiplications(model) for row in rows)


def frozen_multiplications(rows: Iterable[Operator], model: ModelConfig) -> float:
    """Return `multiplications` of the products whose weights do not train."""
    return sum(row.frozen_multiplications(model) for row in rows)


# -- messages -------------------------------------------------------------------------------------


def messages(
    rows: Iterable[Operator], sizes: Sizes, phase: Phase, input_trains: bool = True
) -> Iterator[Message]:
    """Yield the messages of these rows in a phase.

    `input_trains`: a part before these rows trains, so the first row also computes the gradient of
    its input. Otherwise only the rows after the first trained row compute such a gradient.
    """
    for row in rows:
        yield from row.messages(sizes, phase, input_trains)
        input_trains = input_trains or row.trains


def recomputed(rows: Rows, sizes: Sizes) -> Rows:
    """Return the rows that full recomputation computes again: all up to the last row that keeps a
    tensor (torch's checkpoint stops there)."""
    needed = [number for number, row in enumerate(rows, 1) if row.keeps_at_its_end(sizes)]
    return rows[: max(needed, default=0)]


# -- memory ---------------------------------------------------------------------------------------


def items(rows: Rows, sizes: Sizes, mode: str) -> list[Item]:
    """Return every tensor that a layer's backward needs. `account.kept` selects the tensors that
    stay in memory under a mode of recomputation. Full recomputation keeps only the layer's
    input."""
    first = f"{rows[0].name}.input"
    tensors = [Item(first, sizes.local_tokens * sizes.model.hidden, sizes.compute_bytes, "full")]
    for row in rows:
        tensors += [item for item in row.kept(sizes, mode) if item.name != first]
    return tensors


def kept_bytes(rows: Iterable[Operator], sizes: Sizes) -> int:
    """Return the bytes that rows outside of layers keep; these are never recomputed."""
    return sum(total_bytes(row.kept(sizes, "none")) for row in rows)


def operand_bytes(rows: Iterable[Operator], sizes: Sizes) -> int:
    """Return the number of bytes of the operands that a split backward keeps from its I to its
    W."""
    return sum(total_bytes(row.operands(sizes)) for row in rows)


def adding_bytes(rows: Iterable[Operator], sizes: Sizes) -> int:
    """Return the maximal bytes that W needs in addition to its operands; gradients are added one
    after the other."""
    return max((row.adding_bytes(sizes) for row in rows), default=0)


def value_bytes(rows: Iterable[Operator], sizes: Sizes) -> int:
    """Return the bytes of the largest quantized weight when it is unpacked, and of the working
    memory for that; 0 if no weight is quantized."""
    products = [row for row in rows if isinstance(row, Multiply)]
    largest = max((row.quantized_elements(sizes) for row in products), default=0)
    return largest * sizes.compute_bytes + min(largest, chunk_elements(sizes.on_host)) * CHUNK_BYTES


def idle_bytes(rows: Rows, sizes: Sizes) -> int:
    """Return the bytes that the forward of a layer without a backward needs. They are the larger of
    two amounts: the tensors that it would keep for a backward; and the residual stream together
    with the tensors of one row."""
    most = max(row.forward_bytes(sizes) for row in rows) + sizes.boundary_bytes
    return max(total_bytes(kept(items(rows, sizes, "none"), "none")), most)


@dataclass(frozen=True)
class LayerBytes:
    """Bytes of one layer under a mode of recomputation, for one microbatch.

    `kept`: from its forward to its backward. `works`: the maximum that its backward needs in
    addition to what this layer and earlier ones keep. `input_works`: the same in the I of a split
    backward, which also holds the operands of later rows.
    """

    kept: int
    works: int
    input_works: int


def layer_bytes(sublayers: Sequence[Sublayer], sizes: Sizes, mode: str) -> LayerBytes:
    """Walk a layer's backward from its last row to its first, and return its maximum of memory.

    Each row needs its own working memory, the gradient of the residual stream, and the recomputed
    tensors. The tensors of later sublayers have already been freed. The inputs of later rows of the
    same sublayer have been freed, too. Only the memory of the next row's input is still in use,
    because this input's gradient is as large.
    """
    rows = operators(sublayers)
    tensors = items(rows, sizes, mode)
    whole = total_bytes(kept(tensors, mode))
    again = total_bytes(tensors) - whole
    stays = whole
    if mode == "full" and sizes.layout.partition_activations and sizes.layout.tensor > 1:
        # only this rank's share stays; all of it is gathered while the layer is recomputed
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
    if mode == "full":  # recomputation ends with the last dropout mask
        works = max(works, again + rows[-1].drawing_bytes(sizes))
    return LayerBytes(stays, works, max(works, input_works))


def _backwards(sublayer: Sublayer, sizes: Sizes) -> Iterator[tuple[Operator, int]]:
    """Yield each row from the last to the first, with the bytes of later rows' inputs that are
    freed."""
    freed = 0
    after = 0
    for row in reversed(sublayer.operators):
        yield row, freed
        freed += after
        after = row.replaced_bytes(sizes)


def _last_input(sublayer: Sublayer, sizes: Sizes) -> int:
    """Return the bytes of the input of a sublayer's last product, which is kept as an operand until
    W."""
    products = [row for row in sublayer.operators if isinstance(row, Multiply)]
    if not products:
        return 0
    name = f"{products[-1].name}.input"
    return total_bytes(item for item in products[-1].operands(sizes) if item.name == name)
