"""When a run saves, what it says of it, and what it does when it cannot."""

from collections.abc import Callable
from functools import partial

from ptdmpi.base.words import file_size
from ptdmpi.checkpoint.save import Checkpoints, Saved, SaveFailed
from ptdmpi.watch.requests import Save


class Saving:
    """The saves of one run; every rank calls `after_step` behind every step.

    A save that fails is no reason to throw away what is in memory: the run says so, goes on, and
    tries again after 1, 2, 4, ... steps (at most `every_steps`). Only when it ends or is to stop,
    and still cannot save, does it fail.
    """

    def __init__(
        self,
        checkpoints: Checkpoints,
        last_step: int,
        say: Callable[[str], None],
        record: Callable[..., None],
    ) -> None:
        self.checkpoints, self.last_step = checkpoints, last_step
        self.every_steps = checkpoints.config.every_steps
        self.say, self.record = say, record
        self.failures = 0
        self.retry_step: int | None = None
        self.newest: tuple[int, str] | None = None  # step and path of what was saved last
        self.last_write_s = 0.0  # how long the newest save took, for those who plan for one

    def after_step(self, step: int, asked: Save = Save.NO) -> bool:
        """Save if it is due, or asked for; under `Save.NOW`, and after the last step, at once and
        to the end. Returns whether it was due, the same on all ranks.

        Raises SaveFailed, on every rank, where the run must not go on without.
        """
        must = asked is Save.NOW or step == self.last_step
        due = must or asked is Save.DUE or step == self.retry_step
        due = due or (self.every_steps > 0 and step % self.every_steps == 0)
        # apart from the new one: a last save that failed is no reason not to try this one
        self._attempt(self.checkpoints.finish if due else self.checkpoints.poll, step)
        if due:
            self.retry_step = None
            self._attempt(partial(self.checkpoints.save, step), step, must)
        if must:
            self._attempt(self.checkpoints.finish, step, must)
        return due

    def _attempt(self, work: Callable[[], list[Saved]], step: int, must: bool = False) -> None:
        try:
            for saved in work():
                self._report(saved)
        except SaveFailed as error:
            if must:
                raise
            wait = 2**self.failures
            if self.every_steps:
                wait = min(wait, self.every_steps)
            self.failures, self.retry_step = self.failures + 1, step + wait
            self.say(f"warning: {error}; going on, next attempt after step {self.retry_step}")

    def _report(self, saved: Saved) -> None:
        self.failures, self.last_write_s = 0, saved.write_s
        self.newest = (saved.step, str(saved.path))
        self.say(
            f"saved {saved.path} ({file_size(saved.bytes)}, stalled {saved.stall_s:.2f} s, "
            f"written in {saved.write_s:.2f} s)"
        )
        if saved.warning:
            self.say(f"warning: {saved.warning}")
        self.record(
            step=saved.step,
            checkpoint_bytes=saved.bytes,
            checkpoint_stall_s=saved.stall_s,
            checkpoint_write_s=saved.write_s,
        )
