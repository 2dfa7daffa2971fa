"""What a split backward keeps from its I to its W: the operands of the weights' gradients; and what
a product makes of a weight in few bits.

A linear's are its input and the gradient of its output; under sequence parallelism this rank's
positions of those that are gathered. Gradients of norms and biases are there already, and wait to
be added. Nothing depends on recomputation: by then all has been computed again.
"""

import math
from collections.abc import Iterable, Iterator

from ptdmpi.config import ModelConfig
from ptdmpi.plan.cost.kept.activations import Item, Sizes, total_bytes
from ptdmpi.plan.shape import parameters
from ptdmpi.plan.shape.low_bit import CHUNK_BYTES, LowBit, chunk_elements
from ptdmpi.plan.shape.parameters import Linear, LowRankPair, Norm, Part, Scale


def layer_operands(sizes: Sizes) -> list[Item]:
    """Those of one layer."""
    items: list[Item] = []
    for name, part in parameters.layer(sizes.model).items():
        # columns: the input is gathered; rows: the gradient is
        columns = isinstance(part, Linear) and part.split == "columns"
        given, made = sizes.local_tokens, sizes.tokens
        rows = (given, made) if columns else (made, given)
        items += _operands(sizes, name, part, *rows)
        if isinstance(part, Linear) and name in sizes.beside:
            items += _of_adapters(sizes, name, part, *rows)
    return items


def _of_adapters(sizes: Sizes, name: str, part: Linear, given: int, made: int) -> Iterator[Item]:
    """The linear's input and the gradient of its output, which its adapters share, and what is
    narrow of each; of (IA)^3 what it has multiplied."""
    c, (inputs, outputs) = sizes.compute_bytes, part.local(sizes.layout.tensor)
    if sizes.multiplied(name):
        yield Item(f"{name}.input", given * inputs, c)
        yield Item(f"{name}.gradient", made * outputs, c)
    for number, one in enumerate(sizes.beside[name]):
        if isinstance(one, LowRankPair):
            yield Item(f"{name}.adapter{number}", 2 * sizes.tokens * one.rank, c)
        elif isinstance(one, Scale):
            yield Item(f"{name}.scale{number}", sizes.tokens * sum(one.weights(1)), c)
    if not sizes.multiplied(name):
        # a view of it: in front of a linear by rows the gradient of its input
        yield Item(f"{name}.gradient", sizes.tokens * max(inputs, outputs), c)


def embedding_operands(sizes: Sizes, vocab_size: int) -> list[Item]:
    """The gradient of the activations, which are the sum of rows of the tables."""
    model, c = sizes.model, sizes.compute_bytes
    if sizes.model.adapt.adapts:
        return []
    items = [Item("embedding.gradient", sizes.local_tokens * model.hidden, c)]
    if sizes.layout.tensor > 1:
        items.append(Item("embedding.ids", sizes.tokens, 8))
        items.append(Item("embedding.elsewhere", sizes.tokens, 1))
    parts = parameters.embedding(model, vocab_size)
    if "position" in parts:
        # that of a slice of the table is as large as the table
        items.append(Item("embedding.position", model.seq_length * model.hidden, c))
    if "norm" in parts:
        items += _operands(sizes, "embedding.norm", parts["norm"])
    return items


def head_operands(sizes: Sizes, vocab_size: int) -> list[Item]:
    """Final norm, output head, and what a masked model has beside them."""
    items: list[Item] = []
    for name, part in parameters.head(sizes.model, vocab_size).items():
        given = made = sizes.predicted
        if name.startswith("sentence"):  # and that of a task
            given = made = sizes.layout.micro_size
        elif not sizes.model.masked:
            given = sizes.local_tokens
        items += _operands(sizes, name, part, given, made)
    return items


def part_bytes(items: list[Item], name: str) -> int:
    """Those of a part of a layer."""
    return total_bytes([item for item in items if item.name.startswith(name)])


def adding_bytes(sizes: Sizes, parts: Iterable[Part]) -> int:
    """The most that adding one weight's gradient needs beside its operands: what is gathered of
    them, and where gradients are wider than the weights, the product in both types or, where
    products are widened, copies of the operands."""
    c, wide, most = sizes.compute_bytes, sizes.wide_bytes, 0
    for part in parts:
        if isinstance(part, LowRankPair):
            # gathered and dropped from, and the product in both types
            inputs, outputs = part.local(sizes.layout.tensor)
            works = 3 * sizes.tokens * max(inputs, outputs) * sizes.operand_bytes
            most = max(most, works + part.rank * max(inputs, outputs) * (c + wide))
        if not isinstance(part, Linear) or not part.trains:
            continue
        inputs, outputs = part.local(sizes.layout.tensor)
        gathers = part.split is not None and sizes.local_tokens < sizes.tokens
        works = sizes.tokens * (inputs if part.split == "columns" else outputs) * c * gathers
        if sizes.operand_bytes > c:
            works += (sizes.tokens * (inputs + outputs) + inputs * outputs) * sizes.operand_bytes
        elif wide > c:
            works += inputs * outputs * (c + wide)
        most = max(most, works)
    return most


def _operands(sizes: Sizes, name: str, part: Part, given: int = 0, made: int = 0) -> Iterator[Item]:
    """Those of a norm, or of a linear with so many rows in its input and in its gradient."""
    c, tensor = sizes.compute_bytes, sizes.layout.tensor
    if not part.trains:
        return
    if isinstance(part, Norm):
        yield Item(f"{name}.weights", sum(part.weights(tensor)), c)
    if isinstance(part, Linear):
        inputs, outputs = part.local(tensor)
        yield Item(f"{name}.input", given * inputs, c)
        yield Item(f"{name}.gradient", made * outputs, c)
        if part.bias:
            yield Item(f"{name}.bias", outputs, sizes.wide_bytes)


def operand_bytes(
    model: ModelConfig, form: LowBit | None, tensor: int, compute_bytes: int, on_host: bool = True
) -> int:
    """What a product of a weight in few bits makes of it on one of `tensor` ranks: the values of
    the largest one, and what stands beside while they are made. `form` None: nothing."""
    if form is None:
        return 0
    parts = parameters.layer(model).values()
    sizes = (math.prod(part.local(tensor)) for part in parts if isinstance(part, Linear))
    largest = max(sizes)
    return largest * compute_bytes + min(largest, chunk_elements(on_host)) * CHUNK_BYTES
