"""Validations of a run: when they are due, what is measured, that a stop need not wait. Tasks go
with them."""

from collections.abc import Callable
from dataclasses import replace

from ptdmpi.config import Config
from ptdmpi.engine.engine import Engine, Sums
from ptdmpi.train.feed import Feed
from ptdmpi.train.meter import validation_record
from ptdmpi.train.standing import Standing
from ptdmpi.train.tasks import Tasks
from ptdmpi.watch.requests import Asked, Save


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
        """Measure what is due, record and say it; returns what the ranks want by then. Of replicas
        that differ the mean is measured."""
        with self.engine.replicas.averaged():
            return self._after_step(step)

    def _after_step(self, step: int) -> Asked:
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
            # between groups: a validation may take longer than the time that a signal leaves
            asked = self.vote()
            if asked.stop:
                self.journal.say(f"{asked.stop}: validation after step {step} broken off")
                return asked
        values, text = validation_record(
            self.config.data.valid_paths, sums, self.config.model.classifies
        )
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
