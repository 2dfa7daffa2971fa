"""Checks of a model on all ranks before memory is allocated: whether the layout is legal, and
whether all ranks have built the same model.

A sublayer that a user has written may depend on the rank or on an environment variable. Then ranks
would exchange tensors of different sizes, and a transport would write beyond the end of a tensor.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence

from ptdmpi.base.words import counted
from ptdmpi.comm.world import Axes
from ptdmpi.config import Config, ModelConfig, SharedInputError
from ptdmpi.model.stage import Stage
from ptdmpi.plan.layer.describe import layer_of
from ptdmpi.plan.layer.folds import operators
from ptdmpi.plan.layer.legality import refusals
from ptdmpi.plan.layer.operator import Operator, OwnOperator
from ptdmpi.plan.layout.grid import axis_named

NAMED_RANKS = 8  # number of ranks that an error names


def require_legal(config: Config, axes: Axes) -> None:
    """Raise SharedInputError if the ranks describe different models, if an operator of the model
    refuses the layout, or if the run is `reproducible` and its transport does not sum in ascending
    order of ranks. Every rank must call this function."""
    _require_same(axes, _hash(_described(config.model)))
    for mistake in refusals(config.layout, config.model):
        raise SharedInputError(mistake)
    if config.run.reproducible and not axes.exact:
        raise SharedInputError(
            "run.reproducible = true needs sums in ascending rank order, which "
            f'comm.wire = "{config.comm.wire}" does not guarantee; legal: comm.wire = "mpi"'
        )


def require_same_parameters(axes: Axes, stages: Mapping[int, Stage]) -> None:
    """Raise SharedInputError unless ranks with the same stages and experts have declared the same
    parameters: names, shapes, divisions and initial values. Every rank must call this function."""
    lines = (
        f"{name} {parameter.declaration}"
        for stage in stages.values()
        for name, parameter in stage.named_logical_parameters()
    )
    own = [name for name in axes.grid.axes if axis_named(name).other_parameters]
    _require_same(axes, _hash(lines), tuple(axes.coordinates[name] for name in own))


def _described(model: ModelConfig) -> Iterable[str]:
    """Yield a text for each operator of each kind of layer."""
    for kind in dict.fromkeys(run.kind for run in model.runs()):
        for row in operators(layer_of(model, kind)):
            yield _text(row)


def _text(row: Operator) -> str:
    """Return a text for an operator that is the same in every process. Fields that a user has added
    to an operator are left out, because their texts may contain addresses in memory."""
    if not isinstance(row, OwnOperator):
        return repr(row)
    kind = type(row)
    names = (kind.__module__, kind.__qualname__, row.name, row.inputs, row.outputs)
    return f"{names} {dict(row.parts())}"


def _hash(lines: Iterable[str]) -> str:
    """Return a short hash of the lines."""
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def _require_same(axes: Axes, mine: str, place: Sequence[int] = ()) -> None:
    """Raise SharedInputError, on all ranks, if ranks with the same `place` have different hashes.
    `mine` is the hash of this rank. Every rank must call this function."""
    first: dict[Sequence[int], str] = {}
    others = []
    for rank, (where, value) in enumerate(axes.world.all_gather_object((tuple(place), mine))):
        if first.setdefault(where, value) != value:
            others.append(rank)
    if others:
        more = counted(len(others) - NAMED_RANKS, "more rank")
        tail = f" and {more}" if len(others) > NAMED_RANKS else ""
        names = ", ".join(map(str, others[:NAMED_RANKS]))
        raise SharedInputError(
            f"the ranks have built different models: rank {names}{tail} and the first rank with "
            "the same part of the model differ in their operators or parameters; legal: sublayers "
            "(model.sublayers) that depend neither on the rank nor on its environment"
        )
