"""The training loop. After each step, the loop writes the record of the step. Then the loop
validates, saves a checkpoint and stops, each only if it is due.
"""

import contextlib
import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import replace

from ptdmpi.comm.world import World
from ptdmpi.config import Config
from ptdmpi.data.batches import Prefetcher
from ptdmpi.engine.corruption import CorruptState
from ptdmpi.model.batch import Microbatch
from ptdmpi.model.kernels.agreement import DeviceChoice, trying
from ptdmpi.train.hooks import Hooks
from ptdmpi.train.live import Completed, Handover
from ptdmpi.train.parts import assemble
from ptdmpi.train.stopping import Stopping
from ptdmpi.watch.requests import Asked, Save, StopRequest


class Loop:
    """One rank of a training run, from its configuration to its last checkpoint.

    This class determines only the order of events: a step, the record of the step, a validation, a
    checkpoint, and possibly a stop. Other objects make all other decisions: `Saving` decides when
    to save, `Validation` decides when to validate, and `Journal` decides what a record contains.
    The module `parts` creates these objects.
    """

    def __init__(
        self,
        config: Config,
        world: World,
        signals: StopRequest,
        handover: Handover | None = None,
        *,
        hooks: Hooks | None = None,
    ) -> None:
        """Prepare the run (see `parts.assemble`). Every rank must create its `Loop` at the same
        time.

        After ranks were lost, `handover` has the state of the survivors. Raises InputError if the
        run cannot begin.
        """
        self.hooks = hooks or Hooks()
        parts = assemble(config, world, signals, handover=handover, hooks=self.hooks)
        self.config = config
        self.world = world
        self.axes = parts.axes
        self.feed = parts.feed
        self.memory = parts.memory
        self.engine = parts.engine
        self.attempt = parts.attempt
        self.lookout = parts.lookout
        self.profile = parts.profile
        self.skips = parts.skips
        self.saving = parts.saving
        self.validation = parts.validation
        self.journal = parts.journal
        self.stopping = Stopping(config, parts.lookout, parts.attempt, parts.journal)
        self._vote = parts.vote
        self._reader: Prefetcher | None = None  # reads the batches of later steps in advance
        # `completed` is the last step that was trained; `concluded` is the last step whose record,
        # validation and saves are done
        self.completed = parts.start.unfinished
        self.concluded = parts.concluded

    @property
    def first(self) -> int:
        """Return the number of training steps that were done before this loop began."""
        return self.attempt.first

    def run(self) -> None:
        """Train to the end of the run. Raises the errors that `steps` raises."""
        for _ in self.steps():
            pass

    def steps(self) -> Generator[Completed, None, None]:
        """Train from the present step to the last step, or until `run.stop_after_worse` ends the
        run.

        Yield each step after its record, validation and checkpoint. Raises SystemExit on every rank
        if the run must end earlier. The code is 75 after a requested stop, before which the run has
        saved a checkpoint. The code is 1 if too many steps in a row had a loss or a gradient that
        was not finite, and 3 or 4 if the state is corrupt.
        """
        with (
            trying(self._backends()),
            self.attempt.recorded_end(lambda: self.concluded),
        ):
            if not self.attempt.idle:
                try:
                    yield from self._train()
                except CorruptState as error:
                    self.stopping.corrupt(error)
            self.lookout.finish()
            self.attempt.finish(self.concluded)

    def _backends(self) -> tuple[str, ...]:
        """Return the attention backends that torch may use on the run's device. Return () if the
        run computes on the CPU."""
        choice = self.attempt.choice
        return choice.attention if isinstance(choice, DeviceChoice) else ()

    def _train(self) -> Iterator[Completed]:
        with contextlib.closing(self.feed.steps(self.first)) as feed:
            self._reader = feed
            self.lookout.place.enter("training")
            if self.completed is not None:  # a rank was lost after the update of this step
                asked = self._conclude(self.completed)
                yield self.completed
                self._stop_if_asked(asked)
            elif self.validation.owed(self.first):
                self._make_up(self.first)
            asked = self._vote()  # a stop may have been requested while the run was starting
            if asked.stop and self.attempt.live:
                asked = self._save(self.first, asked)
            if self._goes_on(self.first):
                self.stopping.stop_if_asked(asked, self.first)
            for step in range(self.first, self.config.run.steps):
                why = self.validation.standing.over
                if why:
                    self.stopping.end_early(why, self.concluded)
                    break
                self.completed, batches = self._step(step, feed)
                asked = self._conclude(self.completed, batches)
                yield self.completed
                self._stop_if_asked(asked)
        self.journal.keep_timeline(self.concluded)

    def close(self) -> None:
        """End all threads of this rank, without communication, because other ranks may be lost."""
        self.lookout.heartbeat.close()
        self.saving.checkpoints.close()
        self.journal.close()
        # Close the lookout (the object that monitors the run) last, because this unlocks the run
        # directory.
        self.lookout.close()

    def _step(self, step: int, feed: Prefetcher) -> tuple[Completed, list[Microbatch]]:
        """Train step `step` (counted from 0). Return the completed step and its microbatches."""
        self.lookout.place.step = step + 1
        watch = self.engine.stopwatch()
        begin = time.perf_counter()
        with watch.span("data"):
            batches = self.feed.place(next(feed), self.config.model.mtp_modules)
        with self.memory.explained(), self.profile.step(step + 1):
            result = self.engine.step(step, batches)
        elapsed_s = time.perf_counter() - begin
        watches = [stopwatch for stopwatch in (watch, result.watch) if stopwatch is not None]
        self.journal.recent.add(elapsed_s, watches, result.inside_s)
        self.lookout.computed(result.compute_s, elapsed_s)
        # Return the result without its stopwatch, because the result may be sent to other ranks
        # after a loss of ranks, and the stopwatch refers to this rank's device.
        return Completed(step + 1, replace(result, watch=None), elapsed_s), batches

    def _conclude(self, done: Completed, batches: Sequence[Microbatch] | None = None) -> Asked:
        """Write the record of a step. Then validate and save a checkpoint if this is due or
        requested. Return the requests (to stop or save) that the ranks have received so far.
        """
        step = done.number
        # In a vote, all ranks exchange their requests to stop or save. Vote before the record is
        # written, because the vote also computes the greatest peak memory of all ranks, which the
        # record contains. If the next step's data cannot be read, all ranks save this step and end.
        mistake = None if self._reader is None else self._reader.mistake()
        asked = self._vote(mistake)
        self._record(done, asked)
        if batches is not None:
            self.skips.after(step - 1, done.result, batches)
        self.hooks.step_ended(done)
        if self.validation.due(step) and not asked.stop:
            asked = self.validation.after_step(step)
            self.saving.checkpoints.validated = self.validation.standing.last
        asked = self._save(step, asked)
        if self.config.run.on_failure == "shrink":
            # After this barrier, every rank knows that rank 0 has written the record, so the
            # survivors of a later loss do not write it again.
            self.axes.world.barrier()
        self.concluded = step
        return asked

    def _stop_if_asked(self, asked: Asked) -> None:
        """If a stop was requested and the run is not complete, end the run after the last concluded
        step (a step that is recorded, validated and saved).
        """
        if self._goes_on(self.concluded) and not self.validation.standing.over:
            self.stopping.stop_if_asked(asked, self.concluded)

    def _goes_on(self, step: int) -> bool:
        """Return True if the run is not complete after `step`: steps are left, or the validation or
        the evaluation of tasks after the last step was interrupted by a stop.
        """
        return step < self.config.run.steps or self.validation.missed(step)

    def _make_up(self, step: int) -> None:
        """Do the validation and the evaluation of tasks after `step` again, because a stop has
        interrupted them in an earlier attempt of the run.

        If the validation loss is one of the best, save the step again, because the checkpoint of
        this step does not contain the validation loss.
        """
        asked = self.validation.after_step(step)
        self.saving.checkpoints.validated = self.validation.standing.last
        if asked.save:
            self._save(step, asked)
        if self._goes_on(step) and not self.validation.standing.over:
            self.stopping.stop_if_asked(asked, step)

    def _record(self, done: Completed, asked: Asked) -> None:
        """Write the record of a step, and the step's line in the log."""
        course = self.feed.course
        values = {
            "tokens": course.tokens(done.number),
            **course.drawn(done.number),
            "peak_memory_bytes": asked.peak_memory_bytes,
            "vocab_size": self.feed.vocab_size,
        }
        slow = self.lookout.slow_ranks(done.number)
        if slow:
            values["slow_ranks"] = slow
        self.journal.step(done, self.lookout.usual_s(done.elapsed_s), **values)

    def _save(self, step: int, asked: Asked) -> Asked:
        """Save a checkpoint if a save is due or requested. Return the requests (to stop or save)
        that the ranks have received so far.
        """
        if self._goes_on(step):
            self.stopping.before_save(asked, step)
        self.lookout.place.enter("saving")
        saved = self.saving.after_step(step, Save.LAST if asked.stop else asked.save)
        self.lookout.place.enter("training")
        if not saved:
            return asked
        self.lookout.requests.saved(self.saving.last_write_s)
        self.lookout.obeyed("SAVE")
        return self._vote()
