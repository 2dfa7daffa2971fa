"""Numbers of parameters of the parts of a model: sums over the description of the model
(`plan.layer.describe`)."""

import math
from collections.abc import Iterable, Sequence
from functools import partial
from typing import NamedTuple

from ptdmpi.config import ModelConfig
from ptdmpi.config.layout import ON_ONE_RANK, Dealing
from ptdmpi.plan.layer import describe
from ptdmpi.plan.layer.describe import WORD_TABLE
from ptdmpi.plan.layer.folds import operators, parts_of
from ptdmpi.plan.layer.low_bit import LowBit
from ptdmpi.plan.layer.parts import Linear, Part, as_linear, elements, trained


class ModelPart(NamedTuple):
    """A part of a model on one of `tensor` tensor ranks: a stage, or all stages of a pipeline rank.

    It has `layers` layers; the first `idle` of them have no backward. `first` is True if it has the
    embedding, and `last` is True if it has the head. `dealing` says how the experts of its layers
    are distributed over ranks.
    """

    layers: int
    first: bool
    last: bool
    tensor: int = 1
    idle: int = 0
    dealing: Dealing = ON_ONE_RANK

    @classmethod
    def whole(cls, model: ModelConfig) -> "ModelPart":
        """Return the whole model on one rank."""
        return cls(model.layers, True, True, idle=model.idle())

    @classmethod
    def joined(cls, parts: Sequence["ModelPart"]) -> "ModelPart":
        """Return the part of a pipeline rank that has the stages `parts`."""
        return parts[0]._replace(
            layers=sum(part.layers for part in parts),
            first=any(part.first for part in parts),
            last=any(part.last for part in parts),
            idle=sum(part.idle for part in parts),
        )


def stage_parts(
    model: ModelConfig, layers: Sequence[range], *, tensor: int, dealing: Dealing
) -> tuple[ModelPart, ...]:
    """Return the part of the model that each stage has. `layers` has the range of layers of each
    stage."""
    last = len(layers) - 1
    return tuple(
        ModelPart(
            layers=len(own),
            first=stage == 0,
            last=stage == last,
            tensor=tensor,
            idle=model.idle(own),
            dealing=dealing,
        )
        for stage, own in enumerate(layers)
    )


def layer(
    model: ModelConfig, number: int | None = None, dealing: Dealing = ON_ONE_RANK
) -> dict[str, Part]:
    """Return the parts of layer `number` by name. If `number` is None, it is the last layer, which
    has adapters if any layer has adapters. If `dealing` distributes experts over ranks, the result
    has only the experts of the first rank."""
    return parts_of(operators(describe.layer(model, number)), dealing)


def is_of_expert(name: str) -> bool:
    """Return True if the part `name` of a layer belongs to an expert."""
    return name.startswith("mlp.experts.")


def embedding(model: ModelConfig, vocab_size: int) -> dict[str, Part]:
    """Return the parts before the first layer, by name."""
    return parts_of(describe.embedding(model, vocab_size))


def head(model: ModelConfig, vocab_size: int) -> dict[str, Part]:
    """Return the parts after the last layer, by name. The part "head" is included even if its
    weight is tied to the table of the embedding."""
    return parts_of(describe.head(model, vocab_size))


def task_head(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return name -> shape for the weights of the model's head for a task, which a model that was
    trained on text does not have. The result is empty if the model has no head for a task."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, part in head(model, 0).items() if model.classifies else ():
        if name != "final_norm":
            linear = as_linear(part, None)
            shapes[f"{name}.weight"] = (sum(linear.outputs), linear.inputs)
            if linear.bias:
                shapes[f"{name}.bias"] = (sum(linear.outputs),)
    return shapes


def first_linear(model: ModelConfig) -> Linear:
    """Return the first linear of a layer's MLP, or of one of its experts."""
    parts = layer(model)
    name = "mlp.experts.0.up" if model.experts else "mlp.up"
    return as_linear(parts[name], "columns")


def layer_elements(model: ModelConfig, tensor: int = 1, dealing: Dealing = ON_ONE_RANK) -> int:
    """Return the number of parameters of one layer on one tensor rank, if experts are distributed
    by `dealing`."""
    return elements(layer(model, dealing=dealing).values(), tensor)


def trained_elements(model: ModelConfig, tensor: int = 1, dealing: Dealing = ON_ONE_RANK) -> int:
    """Return the number of trained parameters of one layer on one tensor rank, if experts are
    distributed by `dealing`."""
    return elements(trained(layer(model, dealing=dealing).values()), tensor)


def dense_elements(model: ModelConfig, tensor: int) -> int:
    """Return the number of trained parameters of one layer on one tensor rank, without experts."""
    parts = layer(model).items()
    return elements(trained(part for name, part in parts if not is_of_expert(name)), tensor)


def table_elements(model: ModelConfig, vocab_size: int, tensor: int = 1) -> int:
    """Return the number of parameters of the vocabulary's table on one tensor rank."""
    return elements([embedding(model, vocab_size)[WORD_TABLE]], tensor)


def embedding_elements(model: ModelConfig, vocab_size: int, tensor: int = 1) -> int:
    """Return the number of parameters before the first layer on one tensor rank."""
    return elements(embedding(model, vocab_size).values(), tensor)


def head_elements(model: ModelConfig, vocab_size: int, tensor: int = 1) -> int:
    """Return the number of parameters after the last layer on one tensor rank. The head's table is
    included if it is not tied."""
    return elements(head(model, vocab_size).values(), tensor)


def places(
    model: ModelConfig, vocab_size: int, stage: ModelPart, *, trains: bool = True
) -> list[list[int]]:
    """Return the number of elements of each unit on a tensor rank. A unit is a set of parameters
    that are gathered or summed in one message if state is sharded. The result has one list of units
    for each place in the stage (embedding, a layer, the head).

    A tied table is a separate unit at both places. If `trains` is True, the units contain the
    trained parameters. Otherwise they contain the frozen parameters, which are gathered separately
    (`frozen_places`).
    """

    def counted(parts: Iterable[Part]) -> int:
        return elements((part for part in parts if part.trains == trains), stage.tensor)

    table = counted([embedding(model, vocab_size)[WORD_TABLE]]) * model.tie_embeddings
    own = partial(layer, model, dealing=stage.dealing)
    units = [[counted(own(0).values())]] * stage.idle
    units += [[counted(own().values())]] * (stage.layers - stage.idle)
    if stage.first:
        front = counted(embedding(model, vocab_size).values())
        units = [[table, front - table], *units]
    if stage.last:
        behind = counted(head(model, vocab_size).values())
        units = [*units, [table, behind - table]]
    return [[unit for unit in place if unit] for place in units]


def rank_elements(model: ModelConfig, vocab_size: int, held: ModelPart) -> tuple[int, int, int]:
    """Return three numbers of elements for a rank that has the part `held` of a model: all
    parameters, the trained parameters, and the trained parameters of a tied table that the rank
    uses twice, because it has both the embedding and the head. The first two numbers count this
    table once. The second use of the table has a separate gradient.
    """
    table = embedding(model, vocab_size)
    own = partial(layer, model, dealing=held.dealing)
    held_layers = ((held.idle, own(0)), (held.layers - held.idle, own()))
    held_ends = ((int(held.first), table), (int(held.last), head(model, vocab_size)))
    count = train = 0
    for times, parts in (*held_layers, *held_ends):
        count += times * elements(parts.values(), held.tensor)
        train += times * elements(trained(parts.values()), held.tensor)
    if not (held.first and held.last and model.tie_embeddings):
        return count, train, 0
    shared = elements([table[WORD_TABLE]], held.tensor)
    twice = shared * table[WORD_TABLE].trains
    return count - shared, train - twice, twice


def parameter_count(model: ModelConfig, vocab_size: int) -> int:
    """Return the number of parameters of the whole model; the table of a tied head is counted
    once."""
    idle = model.idle()
    count = idle * elements(layer(model, 0).values())
    count += (model.layers - idle) * layer_elements(model)
    count += embedding_elements(model, vocab_size) + head_elements(model, vocab_size)
    return count - table_elements(model, vocab_size) * model.tie_embeddings


def trained_count(model: ModelConfig, vocab_size: int) -> int:
    """Return the number of trained parameters of the whole model; the table of a tied head is
    counted once."""
    _, train, _ = rank_elements(model, vocab_size, ModelPart.whole(model))
    return train


def active_count(model: ModelConfig, vocab_size: int) -> int:
    """Return the number of parameters that are used for one token: all parameters except the
    parameters of experts that the router does not choose."""
    count = parameter_count(model, vocab_size)
    if not model.experts:
        return count
    parts = layer(model).items()
    each = elements(part for name, part in parts if name.startswith("mlp.experts.0."))
    return count - model.layers * (model.experts - model.experts_per_token) * each


def _frozen(model: ModelConfig, tensor: int) -> list[tuple[int, int]]:
    """Return the (inputs, outputs) of a layer's frozen matrices on one of `tensor` ranks."""
    parts = layer(model).values()
    return [p.local(tensor) for p in parts if isinstance(p, Linear) and not p.trains]


def frozen_layer(model: ModelConfig, tensor: int) -> tuple[int, int]:
    """Return (elements, bytes) of a layer's quantized frozen weights on one of `tensor` ranks; (0,
    0) if the model has none."""
    form = LowBit.of(model.quantize)
    if form is None:
        return 0, 0
    shapes = _frozen(model, tensor)
    sizes = [form.bytes_of(outputs, inputs) for inputs, outputs in shapes]
    return sum(map(math.prod, shapes)), sum(sizes)


def frozen_places(model: ModelConfig, vocab_size: int, stage: ModelPart) -> list[list[int]]:
    """Return the result of `places` for the frozen weights that are not quantized. ZeRO 3 gathers
    these weights.

    Layers without a backward have as many frozen weights as other layers.
    """
    units_of_places = places(model, vocab_size, stage, trains=False)
    packed, _ = frozen_layer(model, stage.tensor)
    for place in units_of_places[int(stage.first) :][: stage.layers]:
        place[:] = [unit - packed for unit in place]
    return units_of_places
