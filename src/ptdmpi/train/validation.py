"""Validations of a run: when they are due, what is measured, that a stop need not wait; and what
they say of the run: which were the best, and whether it gets better at all. Tasks go with them."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from ptdmpi.config import Config
from ptdmpi.engine.engine import Engine, Sums
from ptdmpi.sinks.record import kept_records
from ptdmpi.train.feed import Feed
from ptdmpi.train.meter import validation_record
from ptdmpi.train.tasks import Tasks
from ptdmpi.watch.requests import Asked, Save


@dataclass
class Standing:
    """What the validations of a run have come to, in order of their steps: (step, loss in nats per
    token). One whose loss is not below all before it is worse; NaN always is."""

    stop_after_worse: int = 0
    keep_best: int = 0
    seen: list[tuple[int, float]] = field(default_factory=list)
    worse: int = 0  # in a row, up to now

    @property
    def last(self) -> tuple[int, float] | None:
        """The newest validation."""
        return self.seen[-1] if self.seen else None

    @property
    def best(self) -> tuple[int, float] | None:
        """The first validation with the lowest loss; None before any that is finite."""
        finite = [one for one in self.seen if math.isfinite(one[1])]
        return min(finite, key=lambda one: one[1], default=None)

    def take(self, step: int, loss: float) -> bool:
        """One more; returns whether its checkpoint is among the `keep_best` best ones so far."""
        better = sum(not loss < other for _, other in self.seen if math.isfinite(other))
        self.seen.append((step, loss))
        is_best = math.isfinite(loss) and not better
        self.worse = 0 if is_best else self.worse + 1
        return math.isfinite(loss) and better < self.keep_best

    @property
    def remark(self) -> str:
        """What a line of a validation adds."""
        if not (self.stop_after_worse or self.keep_best) or self.best is None:
            return ""
        if self.best == self.last:
            return "  (the best so far)"
        worse = f"{self.worse} of {self.stop_after_worse} " if self.stop_after_worse else ""
        return f"  ({worse}worse than {self.best[1]:.4f} of step {self.best[0]})"

    @property
    def over(self) -> str:
        """Why the run ends before its last step; empty where it goes on."""
        if not 0 < self.stop_after_worse <= self.worse:
            return ""
        best = "" if self.best is None else f" than {self.best[1]:.4f} of step {self.best[0]}"
        return (
            f"run.stop_after_worse = {self.stop_after_worse}: "
            f"{self.worse} validation{'s' * (self.worse > 1)} in a row no better{best}"
        )


def standing_of(config: Config, step: int) -> Standing:
    """After the validations that the run directory has kept, up to the one after `step`."""
    standing = Standing(config.run.stop_after_worse, int(config.checkpoint.keep_best))
    for record in kept_records(Path(config.run.dir) / "metrics.jsonl"):
        if record["step"] <= step and isinstance(record.get("validation_loss"), float):
            standing.take(record["step"], record["validation_loss"])
    return standing


class Validation:
    """The validations of one run; every rank calls `after_step` behind every step.

    `vote` says what the ranks want: a long validation is broken off when they are to stop.
    `standing` is the same on all ranks.
    """

    def __init__(
        self,
        config: Config,
        feed: Feed,
        engine: Engine,
        tasks: Tasks,
        vote: Callable[[], Asked],
        standing: Standing,
    ) -> None:
        self.config, self.feed, self.engine = config, feed, engine
        self.tasks, self.journal, self.vote, self.standing = tasks, tasks.journal, vote, standing
        # what a model must beat to have learned more than pairs of tokens: told once
        self.bigram_pending = config.log.bigram_baseline and bool(feed.valid)

    def due(self, step: int) -> bool:
        """Whether there is a validation after `step`, or tasks are asked."""
        return self._due(step) or self.tasks.due(step)

    def _due(self, step: int) -> bool:
        every, last = self.config.log.validate_every_steps, self.config.run.steps
        return bool(self.feed.valid) and (step == last or (every > 0 and step % every == 0))

    def after_step(self, step: int) -> Asked:
        """Measure what is due, record and say it; returns what the ranks want by then."""
        asked = self._validate(step) if self._due(step) else Asked("", Save.NO, 0)
        ends = bool(self.standing.over)
        if asked.stop or not (self.tasks.due(step) or ends):
            return asked
        later = self.tasks.after_step(step, self.vote)
        return replace(later, stop="" if ends else later.stop, save=max(asked.save, later.save))

    def _validate(self, step: int) -> Asked:
        place = self.engine.place
        sums = [Sums() for _ in self.feed.valid]
        place.enter("validation")
        asked = Asked("", Save.NO, 0)
        for number, group in self.feed.validation():
            sums[number] += self.engine.evaluate(self.feed.place(group))
            asked = self.vote()
            if asked.stop:
                self.journal.say(f"{asked.stop}: validation after step {step} broken off")
                return asked
        values, text = validation_record(self.config.data.valid_paths, sums)
        if self.bigram_pending:
            values["bigram_validation_loss"] = self.feed.bigram_loss()
            text += f"  (bigram model: loss {values['bigram_validation_loss']:.4f})"
            self.bigram_pending = False
        self.journal.keep(step=step, **values)
        # what follows from it is decided by one loss: rank 0's
        loss = self.engine.axes.world.broadcast_object(values["validation_loss"])
        if self.standing.take(step, loss) and not asked.save:
            asked = replace(asked, save=Save.DUE)
        if self.standing.over and step < self.config.run.steps:
            asked = replace(asked, stop="", save=Save.NOW)  # it ends by itself
        self.journal.say(f"step {step}  {text}{self.standing.remark}")
        place.enter("training")
        return asked
