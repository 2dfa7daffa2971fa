"""The best validations of a run, and the test whether the validation loss still improves. This
module does not import MPI, so that a dry run can use it.
"""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from ptdmpi.base.words import counted
from ptdmpi.config import Config, InputError
from ptdmpi.sinks.record import kept_records


class Validated(NamedTuple):
    """A validation: the step after which it was done, and its loss in nats per token."""

    step: int
    loss: float

    @property
    def finite(self) -> bool:
        """Return True if the loss is a finite number."""
        return math.isfinite(self.loss)


@dataclass
class Standing:
    """The validations of a run so far, and the decisions that depend on them.

    `worse` is the number of validations since the last improvement. A validation is an improvement
    if its loss is lower than all earlier losses; NaN is never an improvement. The run ends when
    `worse` reaches `stop_after_worse` (0: never). `trained` is the newest step that had a record
    when this attempt of the run began. `tasks_step` is the newest step with recorded scores of
    tasks. A stop may have interrupted the validation or the evaluation of tasks after step
    `trained`; then `seen` has no validation of this step, or `tasks_step` is lower than `trained`.
    """

    stop_after_worse: int = 0
    keep_best: int = 0
    seen: list[Validated] = field(default_factory=list)
    worse: int = 0
    trained: int = 0
    tasks_step: int = 0

    @property
    def last(self) -> Validated | None:
        """Return the newest validation; None if there is no validation yet."""
        return self.seen[-1] if self.seen else None

    @property
    def best(self) -> Validated | None:
        """Return the validation with the lowest loss (the first of several equal ones). Return None
        if no validation had a finite loss.
        """
        finite = [validation for validation in self.seen if validation.finite]
        return min(finite, key=lambda validation: validation.loss, default=None)

    def take(self, step: int, loss: float) -> bool:
        """Add a validation. Return True if it is one of the `keep_best` best validations so far."""
        new = Validated(step, loss)
        # test "not below" instead of "above or equal", because every comparison with NaN is false
        better = sum(not loss < other.loss for other in self.seen if other.finite)
        self.seen.append(new)
        if new.finite and not better:
            self.worse = 0
        else:
            self.worse += 1
        return new.finite and better < self.keep_best

    @property
    def remark(self) -> str:
        """Return a text for the end of the log line of a validation, which compares the newest
        validation with the best one. Return "" if the configuration neither ends the run early nor
        keeps the best checkpoints, or if no validation had a finite loss.
        """
        best = self.best
        if not (self.stop_after_worse or self.keep_best) or best is None:
            return ""
        if best == self.last:
            return "  (the best so far)"
        count = ""
        if self.stop_after_worse:
            count = f"{self.worse} of {self.stop_after_worse} "
        return f"  ({count}worse than {best.loss:.4f} of step {best.step})"

    @property
    def over(self) -> str:
        """Return the reason why the run must end before its last step, or "" if the run
        continues."""
        if not 0 < self.stop_after_worse <= self.worse:
            return ""
        text = (
            f"run.stop_after_worse = {self.stop_after_worse}: "
            f"{counted(self.worse, 'validation')} in a row no better"
        )
        if self.best is not None:
            text += f" than {self.best.loss:.4f} of step {self.best.step}"
        return text

    def lost_after(self, config: Config, step: int) -> str:
        """Return a text that says which records of the run are lost, if the run has trained `step`
        steps, but has records of fewer."""
        return (
            f"{Path(config.run.dir) / 'metrics.jsonl'} has no record of step {step}, the newest is "
            f"that of step {self.trained}: run.stop_after_worse, checkpoint.keep_best and `ptdmpi "
            "report` do not know the lost records"
        )


def standing_of(config: Config, step: int) -> Standing:
    """Return the `Standing` of the run after step `step`. It is computed from the records in the
    run directory."""
    standing = Standing(config.run.stop_after_worse, int(config.checkpoint.keep_best))
    for record in kept_records(Path(config.run.dir) / "metrics.jsonl"):
        if record["step"] > step:
            continue
        if isinstance(record.get("validation_loss"), float):
            standing.take(record["step"], record["validation_loss"])
        elif "tasks" in record:
            standing.tasks_step = record["step"]
        elif "loss" in record:
            standing.trained = record["step"]
    return standing


def require_no_saves(config: Config) -> None:
    """Raise InputError if the records of a run without checkpoints say that the run has saved a
    checkpoint. The checkpoints may be missing because their file system is not mounted. Without
    this error, the run would begin anew."""
    folder = Path(config.run.dir)
    records = kept_records(folder / "metrics.jsonl")
    saved = max((record["step"] for record in records if "checkpoint_bytes" in record), default=0)
    if saved:
        raise InputError(
            f"{folder / 'checkpoints'} has no checkpoint, but {folder / 'metrics.jsonl'} says that "
            f"the run has saved one after step {saved}; legal: put the checkpoints back, or "
            'checkpoint.resume = "never" to begin anew'
        )
