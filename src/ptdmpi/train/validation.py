"""The validations of a run: when they are due, their values, and the tasks that follow them."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from ptdmpi.config import Config
from ptdmpi.engine.engine import Engine, Sums
from ptdmpi.train.feed import Feed
from ptdmpi.train.standing import Standing
from ptdmpi.train.tasks import Tasks
from ptdmpi.watch.requests import Asked, Save


class Validation:
    """The validations of one run; every rank calls `after_step` after every step.

    `standing` holds the results so far, the same on all ranks.
    """

    def __init__(
        self,
        config: Config,
        feed: Feed,
        engine: Engine,
        tasks: Tasks,
        *,
        vote: Callable[[], Asked],
        standing: Standing,
    ) -> None:
        """`vote` returns what the ranks ask for: a stop breaks a long validation off."""
        self.config = config
        self.feed = feed
        self.engine = engine
        self.tasks = tasks
        self.journal = tasks.journal
        self.vote = vote
        self.standing = standing
        # the loss that a model must beat to have learned more than pairs of tokens: reported once
        self.bigram_pending = config.log.bigram_baseline and bool(feed.valid)

    def due(self, step: int) -> bool:
        """Return True if a validation or the tasks follow `step`."""
        return self._due(step) or self.tasks.due(step)

    def _due(self, step: int) -> bool:
        every = self.config.log.validate_every_steps
        last = self.config.run.steps
        return bool(self.feed.valid) and (step == last or (every > 0 and step % every == 0))

    def owed(self, step: int) -> bool:
        """Return True if this run trained `step` in an earlier start, and a stop broke off the
        validation or the tasks that were due after it."""
        here = 0 < step == self.standing.trained
        return here and (self._validates(step) or self._asks_tasks(step))

    def _validates(self, step: int) -> bool:
        """Return True if a validation is due after `step` and has not been done."""
        last = self.standing.last
        return self._due(step) and (last is None or last.step < step)

    def _asks_tasks(self, step: int) -> bool:
        """Return True if the tasks are due after `step` and have not been evaluated."""
        return self.tasks.due(step) and self.standing.tasks_step < step

    def after_step(self, step: int) -> Asked:
        """Measure, record and report what is due; return what the ranks ask for afterwards.

        If replicas differ, the mean of their weights is measured.
        """
        with self.engine.replicas.averaged():
            return self._after_step(step)

    def _after_step(self, step: int) -> Asked:
        asked = Asked("", Save.NO, 0)
        if self._validates(step):
            asked = self._validate(step)
        ends = bool(self.standing.over)
        if asked.stop or not (self._asks_tasks(step) or ends):
            return asked
        later = self.tasks.after_step(step, self.vote)
        stop = "" if ends else later.stop
        return replace(later, stop=stop, save=max(asked.save, later.save))

    def _validate(self, step: int) -> Asked:
        place = self.engine.place
        sums = [Sums() for _ in self.feed.valid]
        place.enter("validation")
        asked = Asked("", Save.NO, 0)
        for number, group in self.feed.validation():
            sums[number] += self.engine.evaluate(self.feed.place(group))
            # a vote after each group: a validation may take longer than a signal leaves time for
            asked = self.vote()
            if asked.stop:
                self.journal.say(f"{asked.stop}: validation after step {step} broken off")
                return asked
        paths = self.config.data.valid_paths
        values, text = validation_record(paths, sums, self.config.model.classifies)
        if self.bigram_pending:
            loss = self.feed.bigram_loss()
            values["bigram_validation_loss"] = loss
            text += f"  (bigram model: loss {loss:.4f})"
            self.bigram_pending = False
        self.journal.keep(step=step, **values)
        # one loss decides what follows on all ranks: rank 0's
        loss = self.engine.axes.world.broadcast_object(values["validation_loss"])
        if self.standing.take(step, loss) and not asked.save:
            asked = replace(asked, save=Save.DUE)
        if self.standing.over and step < self.config.run.steps:
            asked = replace(asked, stop="", save=Save.NOW)  # the run ends by itself
        self.journal.say(f"step {step}  {text}{self.standing.remark}")
        place.enter("training")
        return asked


def validation_record(
    paths: Sequence[str], sums: Sequence[Sums], classifies: bool = False
) -> tuple[dict[str, Any], str]:
    """Return a validation's record and its line, from the sums of each dataset in `paths`.

    `classifies`: each sample has one right class, and an accuracy is reported instead of a
    perplexity. Losses are means over all tokens, in nats; several datasets have one each, too.
    """
    whole = sum(sums, Sums())
    mean = whole.loss / whole.tokens
    values: dict[str, Any] = {"validation_loss": mean}
    text = f"validation loss {mean:.4f}"
    if classifies:
        accuracy = whole.right / whole.tokens
        values["validation_accuracy"] = accuracy
        text += f"  accuracy {accuracy:.2%}"
    else:
        perplexity = math.exp(mean) if mean < 700 else math.inf  # e^710 is no float64 any more
        values["validation_perplexity"] = perplexity
        text += f"  perplexity {perplexity:.2f}"
        if whole.orders:
            order = whole.order_loss / whole.orders
            values["validation_sentence_order_loss"] = order
            text += f"  sentence order loss {order:.4f}"
    if len(paths) > 1:
        means = {path: part.loss / part.tokens for path, part in zip(paths, sums, strict=True)}
        values["validation_losses"] = means
        text += f"  ({', '.join(f'{path} {loss:.4f}' for path, loss in means.items())})"
    return values, text
