"""Saving of a run's checkpoints: when a save is due, how it is reported, and what happens if it
fails."""

from collections.abc import Callable
from functools import partial

from ptdmpi.base.words import counted, file_size
from ptdmpi.checkpoint.memory import MemoryCopies
from ptdmpi.checkpoint.save import Checkpoints, Saved, SaveFailed
from ptdmpi.train.hooks import Hooks
from ptdmpi.watch.requests import Save


class Saving:
    """The saves of checkpoints in one run. Every rank must call `after_step` after every step.

    A failed save does not end the run, because the state is still in memory. After a failed save,
    the run prints a warning and tries again after 1, 2, 4, ... steps (at most `every_steps`). The
    run fails only if the save after its last step, or before a requested stop, fails.

    `newest` is the pair (step, path) of the newest checkpoint. `last_write_s` is the time that
    writing this checkpoint took, in seconds.
    """

    def __init__(
        self,
        checkpoints: Checkpoints,
        last_step: int,
        *,
        say: Callable[[str], None],
        record: Callable[..., None],
        verify: Callable[[], None],
        hooks: Hooks,
        copies: MemoryCopies | None = None,
    ) -> None:
        """Prepare the saves. `last_step` is the last step of the run. `say` prints a line. `record`
        writes a record of values. `verify` raises an error if the state is corrupt, because a
        corrupt state must not be saved. `copies` is an object that makes in-memory copies of the
        state, or None.
        """
        self.checkpoints = checkpoints
        self.last_step = last_step
        self.every_steps = checkpoints.config.every_steps
        self.say = say
        self.record = record
        self.verify = verify
        self.hooks = hooks
        self.copies = copies
        self.failures = 0
        self.retry_step: int | None = None
        self.newest: tuple[int, str] | None = None
        self.last_write_s = 0.0

    def after_step(self, step: int, asked: Save = Save.NO) -> bool:
        """Save a checkpoint if a save is due or requested by `asked`. Return True if a save was due
        or requested; all ranks return the same value.

        With `Save.NOW` or `Save.LAST`, and after the last step, the method waits until the save is
        complete. If a save with `Save.LAST` or after the last step fails, the method raises
        SaveFailed on every rank.
        """
        must = asked is Save.LAST or step == self.last_step
        regular = self.every_steps > 0 and step % self.every_steps == 0
        due = must or asked is not Save.NO or step == self.retry_step or regular
        if due:
            self.verify()
        # First finish the previous save. If the previous save fails, this save is tried
        # nevertheless.
        self._attempt(self.checkpoints.finish if due else self.checkpoints.poll, step)
        if due:
            self.retry_step = None
            self._attempt(partial(self.checkpoints.save, step), step, must)
        if must or asked is Save.NOW:
            self._attempt(self.checkpoints.finish, step, must)
        if must:
            if self.copies is not None and self.copies.count:
                count = self.copies.count
                mean_ms = 1000 * self.copies.seconds / count
                self.say(f"{counted(count, 'copy')} in memory, {mean_ms:.1f} ms each")
        elif self.copies is not None and step % self.checkpoints.config.memory_every_steps == 0:
            self._copy(self.copies, step, verified=due)
        return due

    def _copy(self, copies: MemoryCopies, step: int, verified: bool) -> None:
        """Copy the state after `step` to the memory of the nodes. If `verified` is False, first
        verify the state. If the copy fails, print a warning and continue."""
        if not verified:
            self.verify()
        why = copies.keep(step)
        if why:
            self.say(f"warning: no copy in memory after step {step}: {why}; the last copy stays")

    def _attempt(self, work: Callable[[], list[Saved]], step: int, must: bool = False) -> None:
        """Call `work`, and report each finished save that it returns. Raises SaveFailed if `work`
        fails and `must` is True.
        """
        try:
            for saved in work():
                self._report(saved)
        except SaveFailed as error:
            if must:
                raise
            wait = 2**self.failures
            if self.every_steps:
                wait = min(wait, self.every_steps)
            self.failures += 1
            self.retry_step = step + wait
            self.say(f"warning: {error}; going on, next attempt after step {self.retry_step}")

    def _report(self, saved: Saved) -> None:
        self.failures = 0
        self.last_write_s = saved.write_s
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
        self.hooks.saved(saved.step, saved.path)
