"""Validations of a run: when they are due, what is measured, and that a stop need not wait."""

from collections.abc import Callable

from ptdmpi.config import Config
from ptdmpi.train.engine import Engine, Sums
from ptdmpi.train.feed import Feed
from ptdmpi.train.journal import Journal
from ptdmpi.train.meter import validation_record
from ptdmpi.watch.requests import Asked, Save


class Validation:
    """The validations of one run; every rank calls `after_step` behind every step.

    `vote` says what the ranks want: a long validation is broken off when they are to stop.
    """

    def __init__(
        self,
        config: Config,
        feed: Feed,
        engine: Engine,
        journal: Journal,
        vote: Callable[[], Asked],
    ) -> None:
        self.config, self.feed, self.engine = config, feed, engine
        self.journal, self.vote = journal, vote
        # what a model must beat to have learned more than pairs of tokens: told once
        self.bigram_pending = config.log.bigram_baseline and bool(feed.valid)

    def due(self, step: int) -> bool:
        """Whether there is a validation after `step`."""
        every, last = self.config.log.validate_every_steps, self.config.run.steps
        return bool(self.feed.valid) and (step == last or (every > 0 and step % every == 0))

    def after_step(self, step: int) -> Asked:
        """Validate, record and say it; returns what the ranks want by then."""
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
        self.journal.say(f"step {step}  {text}")
        place.enter("training")
        return asked
