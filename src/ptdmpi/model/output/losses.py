"""The losses of a step by name: which models have one, what it counts, and its key in the metrics.

A new loss is a row of `LOSS_KINDS`, and a tensor by its name among the `losses` of an output
(`ptdmpi.model.output.heads`). Counts, weights, sums and records iterate over the rows.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from ptdmpi.config import Config, ModelConfig
from ptdmpi.model.batch import Microbatch

TOTAL = "total"  # the weighted sum of all losses, which is minimized
TASK = "task"
ORDER = "order"
RIGHT = "right"
MARGIN = "margin"
PREFERRED = "preferred"
COUNT = "count"


@dataclass(frozen=True)
class SummedLoss:
    """A loss of a global batch, or of many: its sum in nats, and the number of its terms."""

    sum: float = 0.0
    count: float = 0

    @property
    def mean(self) -> float:
        """Return the mean in nats per token, sample or other counted term. Raise ZeroDivisionError
        if there are no terms."""
        return self.sum / self.count

    def plus(self, other: "SummedLoss") -> "SummedLoss":
        """Return the sum of both losses."""
        return SummedLoss(self.sum + other.sum, self.count + other.count)


@dataclass(frozen=True)
class LossKind:
    """The properties of a loss, without its name.

    `used_by` returns True for a model that has the loss. `count` returns the number of its terms in
    a microbatch. `key` is the name of its mean in the records of steps; with the prefix
    "validation_" it is the name in the records of validations. "" means that the loss is not
    recorded. `trains`: its mean is added to the mean of the task's loss, and the gradient is
    computed from this sum; if False, the loss is only measured. `of_routers`: it is a sum over the
    routers of all layers (`model/experts/routing.py`), not an output's loss.
    """

    used_by: Callable[[ModelConfig], bool]
    count: Callable[[Microbatch], float]
    key: str = ""
    trains: bool = True
    of_routers: bool = False


def _of_routers(name: str, count: Callable[[Microbatch], float], key: str) -> LossKind:
    """Return the row of a loss that routers have, if the model's configuration names it."""
    return LossKind(lambda model: name in model.router_losses, count, key, of_routers=True)


def _sequences(batch: Microbatch) -> float:
    return len(batch.samples)


def _positions(batch: Microbatch) -> float:
    return batch.inputs.numel()


def _pairs(batch: Microbatch) -> float:
    assert batch.pairs is not None, "a loss of pairs needs to know them"
    return batch.pairs.counted


# The task's loss comes first: per token, per classified sample, or per pair of answers. `right` and
# `count` are not losses: `right` counts the samples that were classified correctly, and `count` the
# terms of a loss of the user's own (`ptdmpi.model.output.own`), which are known only when it has
# been computed. `margin` and `preferred` are measured for pairs
# (`ptdmpi.model.output.preference`).
LOSS_KINDS: Mapping[str, LossKind] = {
    TASK: LossKind(lambda model: True, lambda batch: batch.tokens),
    ORDER: LossKind(
        lambda model: model.sentence_order, lambda batch: batch.orders, "sentence_order_loss"
    ),
    RIGHT: LossKind(lambda model: model.classifies, lambda batch: batch.tokens, trains=False),
    COUNT: LossKind(lambda model: False, lambda batch: batch.tokens, trains=False),
    MARGIN: LossKind(lambda model: False, _pairs, "reward_margin", trains=False),
    PREFERRED: LossKind(lambda model: False, _pairs, "reward_accuracy", trains=False),
    "sequence_balance": _of_routers("sequence_balance", _sequences, "balance_loss"),
    "batch_balance": _of_routers("batch_balance", _positions, "balance_loss"),
    "router_z": _of_routers("router_z", _positions, "router_z_loss"),
}


def kinds_of(config: Config) -> dict[str, LossKind]:
    """Return the losses that a run has, by name; the task's is the first."""
    more: set[str] = set()
    if config.run.loss:
        more = {COUNT}
    elif config.preference.compares:
        more = {MARGIN, PREFERRED}
    kinds = {
        name: kind
        for name, kind in LOSS_KINDS.items()
        if kind.used_by(config.model) or name in more
    }
    if config.preference.compares:
        kinds[TASK] = replace(kinds[TASK], count=_pairs)
    return kinds


def weights(counts: Mapping[str, float]) -> dict[str, float]:
    """Return the factor of each loss except the task's, given the number of terms of each loss in
    the global batch. With these factors, the sum of all losses divided by the task's number of
    terms is the sum of their means."""
    task_count = counts[TASK] or 1.0
    return {
        # a sum without terms is 0, whatever its weight
        name: task_count / (count or math.inf)
        for name, count in counts.items()
        if name != TASK and LOSS_KINDS[name].trains
    }


def added(every: Iterable[Mapping[str, Sequence[float]]], name: str) -> float:
    """Return the sum of all ranks' losses of one name, added one after the other in the same order
    in all layouts."""
    total = 0.0
    for of_rank in every:
        for loss in of_rank[name]:
            total += loss
    return total


def named(sums: Mapping[str, float], counts: Mapping[str, float]) -> dict[str, SummedLoss]:
    """Return the losses by name. Losses without terms are left out, except the loss of the task."""
    return {
        name: SummedLoss(sums[name], count)
        for name, count in counts.items()
        if name in sums and (count or name == TASK)
    }


def recorded(losses: Mapping[str, SummedLoss]) -> dict[str, float]:
    """Return the means of the losses that have a key of their own, by key; losses without terms are
    left out."""
    return {
        LOSS_KINDS[name].key: loss.mean
        for name, loss in losses.items()
        if LOSS_KINDS[name].key and loss.count
    }


def summed(parts: list[Mapping[str, SummedLoss]]) -> dict[str, SummedLoss]:
    """Return the losses of several batches together, by name."""
    total: dict[str, SummedLoss] = {}
    for losses in parts:
        for name, loss in losses.items():
            total[name] = total.get(name, SummedLoss()).plus(loss)
    return total
