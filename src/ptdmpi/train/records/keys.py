"""The keys of the records in `metrics.jsonl`, and the rows of a report that show their values.

Every key that this version writes has an entry in `RECORD_KEYS`. The records of another version may
have further keys. For a key without an entry, the report shows the name of the key and its newest
value. This module does not import torch, so that reports are fast on login nodes.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ptdmpi.config.model import MOST_MODULES
from ptdmpi.sinks.record import median

# the unit in which the report prints a value
Unit = Literal["number", "seconds", "bytes", "bytes per rank", "fraction", "of dense peak", "text"]
# A function that computes the value of a row from all recorded values of the key, oldest first.
Choice = Callable[[Sequence[Any]], Any]


@dataclass(frozen=True)
class ReportRow:
    """A row of the report. `name` is the key of the row in the output of --json, and `choose` is
    the function that computes the value of the row.

    `label` is the row's name in the table; by default it is `name` with spaces. If `of_layout` is
    True, the row uses only the records of steps that were trained with the newest layout.
    """

    name: str
    choose: Choice
    unit: Unit = "number"
    label: str = ""
    of_layout: bool = False


@dataclass(frozen=True)
class RecordKey:
    """The use of one record key in the report. Exactly one of the three fields is set. `rows` are
    the key's own rows. `within` is the name of an entry of the summary that is computed from this
    key and possibly from other keys (see `_WITHIN` in `report/summary.py`). `hidden` is the reason
    why the report does not show the key.
    """

    rows: tuple[ReportRow, ...] = ()
    within: str = ""
    hidden: str = ""

    def __post_init__(self) -> None:
        """Raise TypeError unless exactly one of `rows`, `within` and `hidden` is given."""
        given = sum(map(bool, (self.rows, self.within, self.hidden)))
        if given != 1:
            raise TypeError(f"a record key declares {given} ways to show it, not one: {self}")


def _first(values: Sequence[Any]) -> Any:
    return values[0]


def _last(values: Sequence[Any]) -> Any:
    return values[-1]


def _largest_of_last(values: Sequence[Any]) -> Any:
    """Return the largest element of the newest value. The value is a list with one number for each
    layer."""
    return max(values[-1], default=None)


def _sum_of_last(values: Sequence[Any]) -> Any:
    """Return the sum of the newest value. The value is a list with one number for each layer."""
    return sum(values[-1])


def _count(values: Sequence[Any]) -> int:
    """Return the number of records in which the value is True, or is a list that is not empty."""
    return sum(map(bool, values))


def _newest(name: str, unit: Unit = "number", label: str = "") -> RecordKey:
    return RecordKey((ReportRow(name, _last, unit, label),))


def _median(name: str, unit: Unit = "number", label: str = "") -> RecordKey:
    """Return a `RecordKey` with one row: the median over the steps with the newest layout."""
    return RecordKey((ReportRow(name, median, unit, label, of_layout=True),))


# keys of the losses of modules for multi-token prediction
AHEAD = tuple(f"multi_token_{module}_loss" for module in range(1, MOST_MODULES + 1))
# the report shows the rows in the order of these keys
RECORD_KEYS: Mapping[str, RecordKey] = {
    # keys about the progress of the run, in the records of steps
    "layout": _newest("layout", "text"),
    "rank_count": _newest("ranks"),
    "step": RecordKey(within="steps"),
    "tokens": _newest("tokens"),
    "loss": RecordKey((ReportRow("first_loss", _first), ReportRow("last_loss", _last))),
    "sentence_order_loss": _newest("last_sentence_order_loss"),
    "balance_loss": _newest("last_balance_loss"),
    "router_z_loss": _newest("last_router_z_loss"),
    "distillation_loss": _newest("last_distillation_loss"),
    **{key: _newest(f"last_{key}") for key in AHEAD},
    "reward_margin": _newest("last_reward_margin"),
    "reward_accuracy": _newest("last_reward_accuracy"),
    "grad_norm": _newest("last_grad_norm"),
    "skipped": RecordKey((ReportRow("skipped_steps", _count),)),
    "samples_drawn": RecordKey(within="drawn"),
    "epochs": RecordKey(within="drawn"),
    "vocab_size": RecordKey(hidden="follows from the data; the sizes of messages need it"),
    "learning_rate": RecordKey(hidden="follows from the configuration; report.html has its curve"),
    "loss_scale": RecordKey(hidden="a part of fp16 training; skipped steps are shown instead"),
    # keys about communication-efficient methods and experts, in the records of steps
    "consensus_distance": _newest("consensus_distance", label="distance between replicas"),
    "bits_per_element": _newest("bits_per_element"),
    "fullest_expert": RecordKey((ReportRow("fullest_expert", _largest_of_last, "fraction"),)),
    "dead_experts": RecordKey((ReportRow("dead_experts", _sum_of_last),)),
    "expert_tokens": RecordKey(hidden="report.html and loads.png show the newest numbers"),
    # keys in the records of validations and of tasks
    "validation_loss": _newest("validation_loss"),
    "validation_perplexity": _newest("validation_perplexity"),
    "validation_accuracy": _newest("validation_accuracy"),
    "validation_sentence_order_loss": _newest("validation_sentence_order_loss"),
    "validation_balance_loss": _newest("validation_balance_loss"),
    "validation_router_z_loss": _newest("validation_router_z_loss"),
    "validation_reward_margin": _newest("validation_reward_margin"),
    "validation_reward_accuracy": _newest("validation_reward_accuracy"),
    "validation_losses": RecordKey(within="validation_losses"),
    "bigram_validation_loss": _newest("bigram_validation_loss"),
    "gradient_noise": RecordKey(within="gradient_noise"),
    "tasks": RecordKey(within="tasks"),
    "tasks_time_s": _median("median_tasks_time_s", "seconds", "median tasks"),
    # keys about speed, memory and messages, in the records of steps
    "step_time_s": _median("median_step_time_s", "seconds", "median step"),
    "tokens_per_s": _median("median_tokens_per_s"),
    "model_tflops_per_rank": _median("median_model_tflops_per_rank"),
    "hardware_tflops_per_rank": _median("median_hardware_tflops_per_rank"),
    "mfu": _median("median_mfu", "of dense peak"),
    "peak_memory_bytes": RecordKey(
        (ReportRow("peak_memory_bytes", max, "bytes per rank", "peak memory"),)
    ),
    "slow_ranks": RecordKey((ReportRow("reports_of_slow_ranks", _count),)),
    "wire_bytes": RecordKey(within="wire"),
    "wire_messages": RecordKey(within="wire"),
    # keys in the records of checkpoints, and of the beginning of an attempt
    "checkpoint_bytes": _newest("checkpoint_bytes", "bytes", "checkpoint"),
    "checkpoint_stall_s": _median("median_checkpoint_stall_s", "seconds", "median save, stalled"),
    "checkpoint_write_s": _median("median_checkpoint_write_s", "seconds", "median save, written"),
    "changed": RecordKey(hidden="the rows of the attempts have it"),
}
