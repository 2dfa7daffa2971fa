"""The losses of a step by name. For each loss, `LOSS_KINDS` defines which models have it, how its
terms are counted, and the key under which it is recorded in the metrics.

To add a loss, add an entry to `LOSS_KINDS`, and return the loss under its name from the method
`losses` of an output (`ptdmpi.model.output.heads`). The code that counts, weights, adds and records
losses iterates over the entries of `LOSS_KINDS`.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from ptdmpi.config import Config, ModelConfig
from ptdmpi.config.model import MOST_MODULES
from ptdmpi.model.batch import Microbatch

TOTAL = "total"  # the weighted sum of all losses, which is minimized
TASK = "task"
ORDER = "order"
RIGHT = "right"
MARGIN = "margin"
PREFERRED = "preferred"
DISTILLATION = "distillation"
COUNT = "count"


@dataclass(frozen=True)
class SummedLoss:
    """A loss over one or several global batches: its sum in nats, and the number of its terms."""

    sum: float = 0.0
    count: float = 0

    @property
    def mean(self) -> float:
        """Return the mean of the loss in nats per term, such as a token or a sample. Raise
        ZeroDivisionError if there are no terms."""
        return self.sum / self.count

    def plus(self, other: "SummedLoss") -> "SummedLoss":
        """Return a loss over the terms of both losses."""
        return SummedLoss(self.sum + other.sum, self.count + other.count)


@dataclass(frozen=True)
class LossKind:
    """The properties of a loss, except its name. `used_by` returns True for a model that has the
    loss. `count` returns the number of the loss's terms in a microbatch. `key` is the name of the
    mean loss in the records of steps; with the prefix "validation_" it is the name in the records
    of validations. If `key` is "", the loss is not recorded. If `trains` is True, training
    minimizes the loss: `factor` times the mean loss is added to the mean of the task's loss.
    Otherwise the loss is only measured. If `of_routers` is True, the loss is a sum over the routers
    of all layers (`model/experts/routing.py`). Otherwise, the output of the model computes the loss
    (`ptdmpi.model.output.heads`)."""

    used_by: Callable[[ModelConfig], bool]
    count: Callable[[Microbatch], float]
    key: str = ""
    trains: bool = True
    of_routers: bool = False
    factor: float = 1.0


def ahead_name(module: int) -> str:
    """Return the name of the loss of a module for multi-token prediction, counted from 0."""
    return f"multi_token_{module + 1}"


def _ahead(module: int) -> LossKind:
    """Return the properties of the loss of a module for multi-token prediction."""
    return LossKind(
        lambda model: module < model.mtp_modules,
        lambda batch: 0.0 if batch.ahead is None else batch.ahead.counts[module],
        f"{ahead_name(module)}_loss",
    )


def _of_routers(name: str, count: Callable[[Microbatch], float], key: str) -> LossKind:
    """Return the properties of the router loss `name`. A model has this loss if its configuration
    names the loss. `count` and `key` are fields of `LossKind`."""
    return LossKind(lambda model: name in model.router_losses, count, key, of_routers=True)


def _sequences(batch: Microbatch) -> float:
    return len(batch.samples) if batch.begins else 0


def _positions(batch: Microbatch) -> float:
    return batch.inputs.numel()


def _taught(batch: Microbatch) -> float:
    return 0.0 if batch.teacher is None else batch.tokens


def _pairs(batch: Microbatch) -> float:
    assert batch.pairs is not None, "the batch must have pairs of answers"
    return batch.pairs.counted


# The task's loss comes first. Its terms are tokens, classified samples, or pairs of answers.
# `right` and `count` are not losses: `right` is the number of correctly classified samples. `count`
# is the number of terms of the user's own loss (`ptdmpi.model.output.own`), which is known only
# when the loss has been computed. `margin` and `preferred` are measured for pairs of answers
# (`ptdmpi.model.output.preference`). `distillation` is the divergence from a teacher's outputs
# (`ptdmpi.model.output.distillation`).
LOSS_KINDS: Mapping[str, LossKind] = {
    TASK: LossKind(lambda model: True, lambda batch: batch.tokens),
    ORDER: LossKind(
        lambda model: model.sentence_order, lambda batch: batch.orders, "sentence_order_loss"
    ),
    RIGHT: LossKind(lambda model: model.classifies, lambda batch: batch.tokens, trains=False),
    COUNT: LossKind(lambda model: False, lambda batch: batch.tokens, trains=False),
    MARGIN: LossKind(lambda model: False, _pairs, "reward_margin", trains=False),
    PREFERRED: LossKind(lambda model: False, _pairs, "reward_accuracy", trains=False),
    DISTILLATION: LossKind(lambda model: False, _taught, "distillation_loss"),
    **{ahead_name(module): _ahead(module) for module in range(MOST_MODULES)},
    "sequence_balance": _of_routers("sequence_balance", _sequences, "balance_loss"),
    "batch_balance": _of_routers("batch_balance", _positions, "balance_loss"),
    "router_z": _of_routers("router_z", _positions, "router_z_loss"),
}


def kinds_of(config: Config) -> dict[str, LossKind]:
    """Return the properties of the losses of a run, by name. The task's loss is the first one."""
    more: set[str] = set()
    if config.run.loss:
        more = {COUNT}
    elif config.preference.compares:
        more = {MARGIN, PREFERRED}
    elif config.distillation.teaches:
        more = {DISTILLATION}
    kinds = {
        name: kind
        for name, kind in LOSS_KINDS.items()
        if kind.used_by(config.model) or name in more
    }
    if config.preference.compares:
        kinds[TASK] = replace(kinds[TASK], count=_pairs)
    modules = config.model.mtp_modules
    for module in range(modules):
        # the mean over the modules (DeepSeek-AI 2024, V3: arXiv 2412.19437, equation 25)
        factor = config.model.mtp_loss_coefficient / modules
        kinds[ahead_name(module)] = replace(kinds[ahead_name(module)], factor=factor)
    return kinds


def weights(
    counts: Mapping[str, float], kinds: Mapping[str, LossKind] | None = None
) -> dict[str, float]:
    """Return the factor of each loss, except the loss of the task. `counts` has the number of terms
    of each loss in the global batch. `kinds` has the properties of the run's losses; None means
    those of `LOSS_KINDS`. The factor of a loss is f N / n, where N is the number of terms of the
    task's loss, n is the number of terms of this loss, and f is the field `factor` of `LossKind`.
    The losses are sums over terms, so (task's loss + sum of factor x loss) / N is the sum of the
    mean losses, in which f weights each mean.
    """
    kinds = LOSS_KINDS if kinds is None else kinds
    task_count = counts[TASK] or 1.0
    return {
        # `math.inf` makes the factor of a loss without terms 0
        name: kinds[name].factor * task_count / (count or math.inf)
        for name, count in counts.items()
        if name != TASK and kinds[name].trains
    }


def added(every: Iterable[Sequence[float]], place: slice) -> float:
    """Return the sum of a loss over all ranks and microbatches. `every` has a sequence of losses
    for each rank. In each sequence, the slice `place` has the values of this loss, one for each
    microbatch. All values are added one after the other, in the same order in all layouts."""
    total = 0.0
    for of_rank in every:
        for loss in of_rank[place]:
            total += loss
    return total


def named(sums: Mapping[str, float], counts: Mapping[str, float]) -> dict[str, SummedLoss]:
    """Return the losses by name, given the sum and the number of terms of each loss. Losses without
    terms are not included, except the loss of the task."""
    return {
        name: SummedLoss(sums[name], count)
        for name, count in counts.items()
        if name in sums and (count or name == TASK)
    }


def recorded(losses: Mapping[str, SummedLoss]) -> dict[str, float]:
    """Return the means of the losses that are recorded: key -> mean. Losses without a key, and
    losses without terms, are not included."""
    return {
        LOSS_KINDS[name].key: loss.mean
        for name, loss in losses.items()
        if LOSS_KINDS[name].key and loss.count
    }


def summed(parts: list[Mapping[str, SummedLoss]]) -> dict[str, SummedLoss]:
    """Return the losses of several batches together, by name: sums and numbers of terms are added.
    `parts` has the losses of each batch."""
    total: dict[str, SummedLoss] = {}
    for losses in parts:
        for name, loss in losses.items():
            total[name] = total.get(name, SummedLoss()).plus(loss)
    return total
