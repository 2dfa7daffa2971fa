"""A check whether a layout is legal, by the rules of the configuration and the rules of the model's
operators.

The configuration's rules (`ptdmpi.config.legality`) depend only on sizes. An operator that a user
has added may refuse more layouts (`Operator.refuses`), for example all layouts with context
parallelism.
"""

import functools
import itertools
from collections.abc import Iterator

from ptdmpi.config import Layout, ModelConfig, legality
from ptdmpi.plan.layer.describe import layer_of
from ptdmpi.plan.layer.fitting import undivided_mistakes
from ptdmpi.plan.layer.folds import operators
from ptdmpi.plan.layer.operator import Operator


def layout_mistakes(layout: Layout, model: ModelConfig | None, batch: int | None) -> Iterator[str]:
    """Yield the reasons why a layout is not legal for this model and global batch, each with legal
    values. Rules about the model or the batch are skipped if `model` or `batch` is None."""
    mistakes = list(legality.layout_mistakes(layout, model, batch))
    yield from mistakes
    if model is not None and not mistakes:
        yield from refusals(layout, model)


def is_legal(layout: Layout, model: ModelConfig | None, batch: int | None) -> bool:
    """Return True if `layout_mistakes` would yield no reason, so that the layout is legal. This
    function is faster than `layout_mistakes`, because it does not make error messages for the
    configuration's rules."""
    if not legality.is_legal(layout, model, batch):
        return False
    return model is None or not any(True for _ in refusals(layout, model))


def refusals(layout: Layout, model: ModelConfig) -> Iterator[str]:
    """Yield the reasons why operators of the model's layers refuse a layout, one line each."""
    for operator in _with_rules(model):
        reason = operator.refuses(layout)
        if reason:
            yield f"{operator.name}: {reason}"
    if layout.tensor > 1:
        yield from _undivided(model)


@functools.lru_cache(maxsize=64)
def _undivided(model: ModelConfig) -> tuple[str, ...]:
    """Return the reasons why the model's layers cannot be divided over several tensor ranks."""
    kinds = {run.kind for run in model.runs()}
    reasons = (undivided_mistakes(operators(layer_of(model, kind)), model.hidden) for kind in kinds)
    return tuple(dict.fromkeys(itertools.chain.from_iterable(reasons)))


@functools.lru_cache(maxsize=64)
def _with_rules(model: ModelConfig) -> tuple[Operator, ...]:
    """Return the operators of the model's layers that override `Operator.refuses`."""
    kinds = {run.kind for run in model.runs()}
    rows = {row.name: row for kind in kinds for row in operators(layer_of(model, kind))}
    return tuple(row for row in rows.values() if type(row).refuses is not Operator.refuses)
