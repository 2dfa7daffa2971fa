"""The best validations of a run, and the test whether the validation loss still improves. This
module does not import MPI, so that a dry run can use it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from ptdmpi.base.words import counted
from ptdmpi.config import Config, InputError
from ptdmpi.lineage.attempts import PastAttempt, attempts
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
    `lost` lists records before step `trained` that are missing; it is empty if none is known to be.
    """

    stop_after_worse: int = 0
    keep_best: int = 0
    seen: list[Validated] = field(default_factory=list)
    worse: int = 0
    trained: int = 0
    tasks_step: int = 0
    lost: str = ""

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

    def warnings(self, config: Config, step: int) -> list[str]:
        """Return texts that say which records of the run are lost, if the run has trained `step`
        steps."""
        texts = []
        if self.trained < step:
            texts.append(f"has no record of step {step}, the newest is that of step {self.trained}")
        if self.lost:
            texts.append(f"lacks {self.lost}")
        return [
            f"{Path(config.run.dir) / 'metrics.jsonl'} {text}: run.stop_after_worse, "
            "checkpoint.keep_best and `ptdmpi report` do not know the lost records"
            for text in texts
        ]


def standing_of(config: Config, step: int) -> Standing:
    """Return the `Standing` of the run after step `step`. It is computed from the records in the
    run directory. The order of the records does not matter."""
    folder = Path(config.run.dir)
    standing = Standing(config.run.stop_after_worse, int(config.checkpoint.keep_best))
    validations: list[Validated] = []
    trained = bytearray(step + 1)  # 1 at each step that has a record
    for record in kept_records(folder / "metrics.jsonl"):
        number = record["step"]
        if not 0 <= number <= step:
            continue
        if isinstance(record.get("validation_loss"), float):
            validations.append(Validated(number, record["validation_loss"]))
        elif "tasks" in record:
            standing.tasks_step = max(number, standing.tasks_step)
        elif "loss" in record:
            trained[number] = 1
    for validation in sorted(validations, key=lambda validation: validation.step):
        standing.take(*validation)
    standing.trained = max(trained.rfind(1), 0)
    validated = {validation.step for validation in validations}
    standing.lost = _lost(_steps_of(folder, step), trained[: standing.trained + 1], validated)
    return standing


class _Trained(NamedTuple):
    """The steps `first` to `last`, of which an earlier attempt of the run has written the newest
    records, and the number of steps between its validations (0: none)."""

    first: int
    last: int
    every: int


def _steps_of(folder: Path, step: int) -> list[_Trained]:
    """Return the steps up to `step` that earlier attempts of the run have trained and recorded in
    the run directory `folder`, as far as the history says so. Steps of another run, from whose
    checkpoint an attempt has resumed, are left out."""
    try:
        past = attempts(folder)
    except OSError:
        return []
    if not all(map(_is_sound, past)):  # the history is damaged
        return []
    trained: list[_Trained] = []
    end, follows = step, True
    for attempt in reversed(past):
        # the end of a killed attempt is not recorded, but it has trained the steps up to the
        # checkpoint of its own from which the next attempt resumed
        last = end if follows else attempt.first
        if attempt.last is not None:
            last = min(attempt.last, end)
        if last > attempt.first:
            trained.append(_Trained(attempt.first + 1, last, _validates_every(attempt)))
        # the next attempt has removed the records after its first step
        if attempt.first < end:
            end = attempt.first
            follows = attempt.config["checkpoint"]["resume"] == "auto"
    return trained[::-1]


def _is_sound(attempt: PastAttempt) -> bool:
    """Return True if the values of an attempt that `_steps_of` reads have legal types."""
    numbers = (attempt.first, attempt.first if attempt.last is None else attempt.last)
    try:
        return (
            all(isinstance(number, int) and number >= 0 for number in numbers)
            and isinstance(attempt.config["checkpoint"]["resume"], str)
            and _validates_every(attempt) >= 0
        )
    except (KeyError, TypeError):
        return False


def _validates_every(attempt: PastAttempt) -> int:
    """Return the number of steps between the validations of an attempt; 0 if it has validated at
    most after its last step."""
    config = attempt.config
    return config["log"]["validate_every_steps"] if config["data"]["valid"] else 0


def _lost(past: Sequence[_Trained], trained: bytearray, validated: set[int]) -> str:
    """Return a text that lists the steps and validations of earlier attempts (`past`) that have no
    record; "" if there are none. `trained` has a 1 at each step with a record, and ends at the
    newest of these steps. `validated` has the steps after which a validation is recorded."""
    steps: list[int] = []
    checks: list[int] = []
    for first, last, every in past:
        last = min(last, len(trained) - 1)
        steps += [step for step in range(first, last + 1) if not trained[step]]
        if every:
            # a stop may have interrupted the validation after the last step
            due = range(-(-first // every) * every, last, every)
            checks += [step for step in due if step not in validated]
    texts = []
    if steps:
        texts.append(f"the records of {counted(len(steps), 'step')} (the first is step {steps[0]})")
    if checks:
        count = counted(len(checks), "validation")
        texts.append(f"the records of {count} (the first is after step {checks[0]})")
    return " and ".join(texts)


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
