"""The validations of a run: when they are due, their results, and the evaluation of tasks after a
validation."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ptdmpi.config import Config, InputError, SharedInputError
from ptdmpi.engine.engine import Engine
from ptdmpi.model.output.losses import COUNT, MARGIN, RIGHT, TASK, SummedLoss, recorded, summed
from ptdmpi.train.feed import Feed
from ptdmpi.train.hooks import Hooks
from ptdmpi.train.records.journal import Journal
from ptdmpi.train.standing import Standing
from ptdmpi.watch.requests import Asked, Save, Vote

if TYPE_CHECKING:
    from ptdmpi.train.tasks import Tasks


class Validation:
    """The validations of one run, on one rank. Every rank must call `after_step` after each step
    for which `due` returns True.

    `standing` contains the results of the validations so far, which are the same on all ranks.
    `tasks` evaluates task files; None if the run has no task files.
    """

    def __init__(
        self,
        config: Config,
        feed: Feed,
        engine: Engine,
        journal: Journal,
        *,
        vote: Vote,
        standing: Standing,
        hooks: Hooks,
    ) -> None:
        """Prepare the validations. `vote` is a function that returns the requests to stop or save.
        It is also called during a validation, because a request to stop interrupts the validation.
        Its optional argument is the error with which this rank has failed to read its data.
        """
        self.config = config
        self.feed = feed
        self.engine = engine
        self.tasks: Tasks | None = None
        self.journal = journal
        self.vote = vote
        self.standing = standing
        self.hooks = hooks
        self.values: dict[str, Any] = {}  # the values in the record of the newest validation.
        # True until the loss of a bigram model has been reported, once. If the loss of the trained
        # model is lower, the model has learned more than the frequencies of pairs of tokens.
        self.bigram_pending = config.log.bigram_baseline and bool(feed.valid)

    def due(self, step: int) -> bool:
        """Return True if a validation or an evaluation of the tasks is due after `step`."""
        return self._due(step) or (self.tasks is not None and self.tasks.due(step))

    def _due(self, step: int) -> bool:
        every = self.config.log.validate_every_steps
        last = self.config.run.steps
        return bool(self.feed.valid) and (step == last or (every > 0 and step % every == 0))

    def owed(self, step: int) -> bool:
        """Return True if an earlier attempt of this run trained `step`, and a stop interrupted the
        validation or the evaluation of tasks after this step."""
        return 0 < step == self.standing.trained and self.missed(step)

    def missed(self, step: int) -> bool:
        """Return True if the validation or the evaluation of the tasks is due after `step` and has
        not been done."""
        return self._validates(step) or self._asks_tasks(step)

    def _validates(self, step: int) -> bool:
        """Return True if a validation is due after `step` and has not been done."""
        last = self.standing.last
        return self._due(step) and (last is None or last.step < step)

    def _asks_tasks(self, step: int) -> bool:
        """Return True if the evaluation of the tasks is due after `step` and has not been done."""
        due = self.tasks is not None and self.tasks.due(step)
        return due and self.standing.tasks_step < step

    def measured(self, step: int) -> dict[str, Any]:
        """Return the values of the validation after `step`. If this validation has not been done
        yet, do it now. Return {} if a stop interrupts the validation, or if the run has no
        validation data. Raise SharedInputError, on every rank, if a rank cannot read its data.
        """
        last = self.standing.last
        if self.feed.valid and (last is None or last.step < step or not self.values):
            with self.engine.replicas.averaged():
                asked = self._validate(step)
            if asked.mistake:
                raise SharedInputError(asked.mistake)
            if asked.stop:
                return {}
        return self.values

    def after_step(self, step: int) -> Asked:
        """Do the validation and the evaluation of tasks if they are due, and record and log the
        results. Return the requests (to stop or save) that the ranks have received so far.

        If replicas differ, the model with the mean of their weights is validated.
        """
        with self.engine.replicas.averaged():
            return self._after_step(step)

    def _after_step(self, step: int) -> Asked:
        asked = Asked("", Save.NO, 0)
        if self._validates(step):
            asked = self._validate(step)
        ends = bool(self.standing.over)
        if asked.stop or self.tasks is None or not (self._asks_tasks(step) or ends):
            return asked
        later = self.tasks.after_step(step, self.vote)
        stop = "" if ends else later.stop
        return replace(later, stop=stop, save=max(asked.save, later.save))

    def _validate(self, step: int) -> Asked:
        place = self.engine.place
        losses: list[dict[str, SummedLoss]] = [{} for _ in self.feed.valid]
        place.enter("validation")
        asked = Asked("", Save.NO, 0)
        groups = self.feed.validation()
        while True:
            mistake = None
            try:
                number, group = next(groups, (0, []))
            except (InputError, OSError) as error:
                mistake = error
            # Before each group of microbatches, the ranks vote whether a stop was requested,
            # because a batch system may kill the run before a long validation is complete. They
            # also vote whether all of them could read the group.
            asked = self.vote(mistake)
            if asked.stop:
                self.journal.say(f"{asked.stop}: validation after step {step} interrupted")
                return asked
            if not group:
                break
            measured = self.engine.evaluate(self.feed.place(group))
            losses[number] = summed([losses[number], measured])
        if not summed([*losses])[TASK].count:
            raise SharedInputError(
                f"the validation after step {step} has no loss, because no label of the validation "
                "data counts (all are masked, or run.loss counts none)"
            )
        paths = self.config.data.valid_paths
        values, text = validation_record(paths, losses)
        if self.bigram_pending:
            loss = self.feed.bigram_loss()
            values["bigram_validation_loss"] = loss
            text += f"  (bigram model: loss {loss:.4f})"
            self.bigram_pending = False
        self.journal.keep(step=step, **values)
        self.values = values
        self.hooks.validated(step, values)
        # all ranks use the loss of rank 0, so that all make the same decision
        loss = self.engine.axes.world.broadcast_object(values["validation_loss"])
        if self.standing.take(step, loss) and not asked.save:
            asked = replace(asked, save=Save.DUE)
        if self.standing.over and step < self.config.run.steps:
            # The run ends because its loss no longer improves: do not report another reason.
            asked = replace(asked, stop="", save=Save.LAST)
        self.journal.say(f"step {step}  {text}{self.standing.remark}")
        place.enter("training")
        return asked


def validation_record(
    paths: Sequence[str], losses: Sequence[Mapping[str, SummedLoss]]
) -> tuple[dict[str, Any], str]:
    """Return the record and the log line of a validation. `losses` are the losses on each dataset
    in `paths`.

    Losses are means over all tokens, in nats. A perplexity is reported only for text, and an
    accuracy only for a classification. If there are several datasets, the loss on each dataset is
    reported, too.
    """
    whole = summed(list(losses))
    mean = whole[TASK].mean
    values: dict[str, Any] = {"validation_loss": mean}
    text = f"validation loss {mean:.4f}"
    if RIGHT in whole:
        accuracy = whole[RIGHT].mean
        values["validation_accuracy"] = accuracy
        text += f"  accuracy {accuracy:.2%}"
    elif COUNT not in whole and MARGIN not in whole:
        # only for text, the exponential of the loss is a perplexity; e^710 is too large for float64
        perplexity = math.exp(mean) if mean < 700 else math.inf
        values["validation_perplexity"] = perplexity
        text += f"  perplexity {perplexity:.2f}"
    for key, more in recorded(whole).items():
        values[f"validation_{key}"] = more
        text += f"  {key.replace('_', ' ')} {more:.4f}"
    if len(paths) > 1:
        means = {path: of_file[TASK].mean for path, of_file in zip(paths, losses, strict=True)}
        values["validation_losses"] = means
        text += f"  ({', '.join(f'{path} {loss:.4f}' for path, loss in means.items())})"
    return values, text
