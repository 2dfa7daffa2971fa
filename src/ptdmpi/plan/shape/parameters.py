"""The numbers of parameters in each part of a model. Each number is a sum over the operators that
`plan.layer.describe` lists for the model."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from ptdmpi.config import ModelConfig
from ptdmpi.config.kinds import LayerKind, Runs, count_of, merged, trained_runs
from ptdmpi.config.layout import ON_ONE_RANK, Dealing
from ptdmpi.plan.layer import describe
from ptdmpi.plan.layer.ahead.modules import MODULES, TABLE, inner
from ptdmpi.plan.layer.describe import WORD_TABLE
from ptdmpi.plan.layer.folds import operators, parts_of
from ptdmpi.plan.layer.low_bit import LowBit
from ptdmpi.plan.layer.parts import Linear, Part, as_linear, elements, trained


class ModelPart(NamedTuple):
    """A part of a model on one of `tensor` tensor-parallel ranks: a stage, or all stages of a
    pipeline rank.

    `runs` lists the layers of this part in order. Each entry is a kind of layer (with or without
    experts, with or without a backward), and the number of consecutive layers of this kind. `first`
    is True if the part has the embedding, and `last` is True if the part has the head. `dealing`
    says how experts are distributed over ranks.
    """

    runs: Runs
    first: bool
    last: bool
    tensor: int = 1
    dealing: Dealing = ON_ONE_RANK

    @property
    def layers(self) -> int:
        """Return the number of layers of this part."""
        return count_of(self.runs)

    @property
    def idle(self) -> int:
        """Return the number of layers of this part that have no backward."""
        return sum(run.layers for run in self.runs if run.kind.idle)

    @classmethod
    def whole(cls, model: ModelConfig) -> "ModelPart":
        """Return a `ModelPart` that describes the whole model on one rank."""
        return cls(model.runs(), True, True)

    @classmethod
    def joined(cls, parts: Sequence["ModelPart"]) -> "ModelPart":
        """Return the part of the model on a pipeline rank that has the stages `parts`."""
        return parts[0]._replace(
            runs=merged(run for part in parts for run in part.runs),
            first=any(part.first for part in parts),
            last=any(part.last for part in parts),
        )


def stage_parts(runs: Sequence[Runs], *, tensor: int, dealing: Dealing) -> tuple[ModelPart, ...]:
    """Return the part of the model that each stage has. `runs` has, for each stage, its groups of
    neighbouring layers of the same kind. `dealing` is the distribution of experts over ranks."""
    last = len(runs) - 1
    return tuple(
        ModelPart(
            runs=own,
            first=stage == 0,
            last=stage == last,
            tensor=tensor,
            dealing=dealing,
        )
        for stage, own in enumerate(runs)
    )


def layer(
    model: ModelConfig, kind: LayerKind | None = None, dealing: Dealing = ON_ONE_RANK
) -> dict[str, Part]:
    """Return the groups of parameters (parts) of a layer of kind `kind`, by name. If `kind` is
    None, the result is for the last layer, which has adapters if any layer has them. If `dealing`
    distributes experts over ranks, the result has only the experts of the first rank."""
    if kind is None:
        kind = model.kind_of(model.layers - 1)
    return parts_of(operators(describe.layer_of(model, kind)), dealing)


def is_of_expert(name: str) -> bool:
    """Return True if the parameters named `name` belong to an expert. `name` is the name of
    parameters within their layer, for example "mlp.experts.0.up", or the name of parameters after
    the last layer."""
    in_module = name.startswith(f"{MODULES}.") and ".mlp.experts." in name
    return name.startswith("mlp.experts.") or in_module


def is_of_router(name: str) -> bool:
    """Return True if the parameters named `name` belong to the router of the experts. `name` is the
    name of parameters within their layer, for example "mlp.router", or the name of parameters after
    the last layer."""
    in_module = name.startswith(f"{MODULES}.") and name.endswith(".mlp.router")
    return name == "mlp.router" or in_module


def embedding(model: ModelConfig, vocab_size: int) -> dict[str, Part]:
    """Return the groups of parameters (parts) before the first layer, by name."""
    return parts_of(describe.embedding(model, vocab_size))


def head(model: ModelConfig, vocab_size: int, dealing: Dealing = ON_ONE_RANK) -> dict[str, Part]:
    """Return the groups of parameters (parts) after the last layer, by name. The table of the
    embedding is included if operators after the last layer use it (`ModelConfig.shares_table`). The
    name of the table is then "head", or, if the head is not tied, `TABLE`. If `dealing` distributes
    experts over ranks, the result has only the experts of the first rank."""
    parts = parts_of(describe.head(model, vocab_size))
    for number in range(model.mtp_modules):
        own = parts_of(inner(model), dealing)
        parts |= {f"{MODULES}.{number}.{name}": part for name, part in own.items()}
    if model.mtp_modules and not model.tie_embeddings:
        parts[TABLE] = embedding(model, vocab_size)[WORD_TABLE]
    return parts


def task_head(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of each weight of the head that computes scores for a complete sequence, by
    name. A checkpoint of a pretrained language model does not have these weights. The result is
    empty if the model has no such head."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, part in head(model, 0).items() if model.classifies else ():
        if name != "final_norm":
            linear = as_linear(part, None)
            shapes[f"{name}.weight"] = (sum(linear.outputs), linear.inputs)
            if linear.bias:
                shapes[f"{name}.bias"] = (sum(linear.outputs),)
    return shapes


def first_linear(model: ModelConfig) -> Linear:
    """Return the first linear layer of an expert, or of the MLP if the model has no experts."""
    mixes = model.experts > 0
    parts = layer(model, LayerKind(mixes))
    return as_linear(parts["mlp.experts.0.up" if mixes else "mlp.up"], "columns")


def layer_elements(model: ModelConfig, tensor: int = 1, dealing: Dealing = ON_ONE_RANK) -> int:
    """Return the number of parameters of one layer on one of `tensor` tensor-parallel ranks, as the
    mean over the layers, rounded down. `dealing` is the distribution of experts over ranks."""
    every = sum(
        times * elements(layer(model, kind, dealing).values(), tensor)
        for kind, times in _counts(model.runs())
    )
    return every // model.layers


def kind_elements(
    model: ModelConfig, kind: LayerKind, tensor: int = 1, dealing: Dealing = ON_ONE_RANK
) -> int:
    """Return the number of trained parameters of a layer of kind `kind` on one of `tensor`
    tensor-parallel ranks. `dealing` is the distribution of experts over ranks."""
    return elements(trained(layer(model, kind, dealing).values()), tensor)


def trained_elements(model: ModelConfig, tensor: int = 1, dealing: Dealing = ON_ONE_RANK) -> int:
    """Return the number of trained parameters of a layer (`kind_elements`), as the mean over the
    layers that have a backward, rounded down."""
    return _mean_elements(model, lambda kind: kind_elements(model, kind, tensor, dealing))


def dense_elements(model: ModelConfig, tensor: int) -> int:
    """Return the number of trained parameters of one layer on one tensor-parallel rank, without the
    parameters of experts. The result is the mean over the layers that have a backward, rounded
    down."""

    def counted(kind: LayerKind) -> int:
        parts = layer(model, kind).items()
        return elements(trained(part for name, part in parts if not is_of_expert(name)), tensor)

    return _mean_elements(model, counted)


def _mean_elements(model: ModelConfig, counted: Callable[[LayerKind], int]) -> int:
    """Return the mean of `counted` over the layers that have a backward, rounded down; 0 if there
    are no such layers."""
    runs = trained_runs(model.runs())
    return sum(run.layers * counted(run.kind) for run in runs) // max(1, count_of(runs))


def table_elements(model: ModelConfig, vocab_size: int, tensor: int = 1) -> int:
    """Return the number of parameters of the vocabulary's embedding table on one of `tensor`
    tensor-parallel ranks."""
    return elements([embedding(model, vocab_size)[WORD_TABLE]], tensor)


def embedding_elements(model: ModelConfig, vocab_size: int, tensor: int = 1) -> int:
    """Return the number of parameters before the first layer on one of `tensor` tensor-parallel
    ranks."""
    return elements(embedding(model, vocab_size).values(), tensor)


def head_elements(model: ModelConfig, vocab_size: int, tensor: int = 1) -> int:
    """Return the number of parameters after the last layer on one of `tensor` tensor-parallel
    ranks, including the table of the head, even if it is tied to the embedding."""
    return elements(head(model, vocab_size).values(), tensor)


def places(
    model: ModelConfig, vocab_size: int, stage: ModelPart, *, trains: bool = True
) -> list[list[int]]:
    """Return the number of elements of each unit of a stage on one tensor-parallel rank. A unit is
    a set of parameters that are gathered or summed in one message if the training state is sharded.
    The result has a list of units for each place of the stage (the embedding, each layer, and the
    head).

    A table that embedding and head share is a separate unit in the lists of both. If `trains` is
    True, the units contain the trained parameters. If `trains` is False, the units contain the
    frozen parameters, which are gathered separately (`frozen_places`).
    """

    def counted(parts: Iterable[Part]) -> int:
        return elements((part for part in parts if part.trains == trains), stage.tensor)

    table = counted([embedding(model, vocab_size)[WORD_TABLE]]) * model.shares_table
    units: list[list[int]] = []
    for kind, count in stage.runs:
        units += [[counted(layer(model, kind, stage.dealing).values())]] * count
    if stage.first:
        front = counted(embedding(model, vocab_size).values())
        units = [[table, front - table], *units]
    if stage.last:
        behind = counted(head(model, vocab_size, stage.dealing).values())
        units = [*units, [table, behind - table]]
    return [[unit for unit in place if unit] for place in units]


def rank_elements(model: ModelConfig, vocab_size: int, held: ModelPart) -> tuple[int, int, int]:
    """Return three numbers for a rank that has the part `held` of a model. The first is the number
    of all parameters, and the second is the number of trained parameters. These two numbers count a
    tied table once. The third is the number of trained parameters of a tied table that the rank
    uses twice, or 0 unless the rank has both the embedding and the head. The third number is needed
    because the second use of the table has a separate gradient.
    """
    table = embedding(model, vocab_size)
    held_layers = [(count, layer(model, kind, held.dealing)) for kind, count in _counts(held.runs)]
    ends = head(model, vocab_size, held.dealing)
    held_ends = ((int(held.first), table), (int(held.last), ends))
    count = train = 0
    for times, parts in (*held_layers, *held_ends):
        count += times * elements(parts.values(), held.tensor)
        train += times * elements(trained(parts.values()), held.tensor)
    if not (held.first and held.last and model.shares_table):
        return count, train, 0
    shared = elements([table[WORD_TABLE]], held.tensor)
    twice = shared * table[WORD_TABLE].trains
    return count - shared, train - twice, twice


def parameter_count(model: ModelConfig, vocab_size: int) -> int:
    """Return the number of parameters of the whole model. A table that embedding and head share is
    counted once."""
    counts = _counts(model.runs())
    count = sum(times * elements(layer(model, kind).values()) for kind, times in counts)
    count += embedding_elements(model, vocab_size) + head_elements(model, vocab_size)
    return count - table_elements(model, vocab_size) * model.shares_table


def trained_count(model: ModelConfig, vocab_size: int) -> int:
    """Return the number of trained parameters of the whole model. A table that embedding and head
    share is counted once."""
    _, train, _ = rank_elements(model, vocab_size, ModelPart.whole(model))
    return train


def active_count(model: ModelConfig, vocab_size: int) -> int:
    """Return the number of parameters that are used for one token: all parameters except the
    parameters of experts that the router does not choose."""
    count = parameter_count(model, vocab_size)
    if not model.experts:
        return count
    parts = layer(model, LayerKind(mixes=True)).items()
    each = elements(part for name, part in parts if name.startswith("mlp.experts.0."))
    unused = model.experts - model.experts_per_token
    return count - len(model.routing_layers) * unused * each


def _counts(runs: Runs) -> list[tuple[LayerKind, int]]:
    """Return pairs (kind of layer, number of layers of this kind in `runs`), one for each kind."""
    counts = Counter[LayerKind]()
    for kind, count in runs:
        counts[kind] += count
    return list(counts.items())


def _frozen(model: ModelConfig, tensor: int) -> list[tuple[int, int]]:
    """Return (number of inputs, number of outputs) for each frozen matrix of a layer on one of
    `tensor` tensor-parallel ranks."""
    parts = layer(model).values()
    return [p.local(tensor) for p in parts if isinstance(p, Linear) and not p.trains]


def frozen_layer(model: ModelConfig, tensor: int) -> tuple[int, int]:
    """Return the number of elements and the bytes of a layer's quantized frozen weights on one of
    `tensor` tensor-parallel ranks; (0, 0) if the model has none."""
    form = LowBit.of(model.quantize)
    if form is None:
        return 0, 0
    shapes = _frozen(model, tensor)
    sizes = [form.bytes_of(outputs, inputs) for inputs, outputs in shapes]
    return sum(map(math.prod, shapes)), sum(sizes)


def frozen_places(model: ModelConfig, vocab_size: int, stage: ModelPart) -> list[list[int]]:
    """Return the number of elements of each unit (see `places`) of the frozen weights that are not
    quantized. ZeRO 3 gathers these weights.

    `places` also counts quantized weights in the unit of each layer, so their number is subtracted.
    All layers have the same number of quantized weights, even layers without a backward.
    """
    units_of_places = places(model, vocab_size, stage, trains=False)
    packed, _ = frozen_layer(model, stage.tensor)
    for place in units_of_places[int(stage.first) :][: stage.layers]:
        place[:] = [unit - packed for unit in place]
    return units_of_places
