"""What a split backward keeps from its I to its W: the operands of the weights' gradients.

A linear's are its input and the gradient of its output; under sequence parallelism this rank's
positions of those that are gathered. Gradients of norms and biases are there already, and wait to
be added. Nothing depends on recomputation: by then all has been computed again.
"""

from collections.abc import Iterable, Iterator

from ptdmpi.plan.cost.activations import Item, Sizes, total_bytes
from ptdmpi.plan.shape import parameters
from ptdmpi.plan.shape.parameters import Linear, Norm, Part


def layer_operands(sizes: Sizes) -> list[Item]:
    """Those of one layer."""
    items: list[Item] = []
    for name, part in parameters.layer(sizes.model).items():
        # columns: the input is gathered; rows: the gradient is
        columns = isinstance(part, Linear) and part.split == "columns"
        given, made = sizes.local_tokens, sizes.tokens
        items += _operands(sizes, name, part, *((given, made) if columns else (made, given)))
    return items


def embedding_operands(sizes: Sizes, vocab_size: int) -> list[Item]:
    """The gradient of the activations, which are the sum of rows of the tables."""
    model, c = sizes.model, sizes.compute_bytes
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
        if name.startswith("sentence"):
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
        if not isinstance(part, Linear):
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
    if isinstance(part, Norm):
        yield Item(f"{name}.weights", sum(part.weights(tensor)), c)
    if isinstance(part, Linear):
        inputs, outputs = part.local(tensor)
        yield Item(f"{name}.input", given * inputs, c)
        yield Item(f"{name}.gradient", made * outputs, c)
        if part.bias:
            yield Item(f"{name}.bias", outputs, sizes.wide_bytes)
