"""The training loop: batch -> engine -> meter, validation, checkpoints, the run directory."""

import contextlib
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from ptdmpi.base.heap import give_back, keep_freed
from ptdmpi.checkpoint.save import Checkpoints
from ptdmpi.comm.wires import wire_named
from ptdmpi.comm.world import World
from ptdmpi.config import Config
from ptdmpi.data.batches import Prefetcher
from ptdmpi.engine.engine import Engine, StepResult
from ptdmpi.inference.model import device_of
from ptdmpi.model.batch import Batch
from ptdmpi.model.kernels import choice
from ptdmpi.plan.layout.grid import grid_of
from ptdmpi.train.attempt import Attempt
from ptdmpi.train.capacity import Memory
from ptdmpi.train.feed import Feed
from ptdmpi.train.journal import Journal
from ptdmpi.train.live import Completed, Handover
from ptdmpi.train.meter import Rates, agreed_peak_flops, device_name, peak_memory_bytes
from ptdmpi.train.nonfinite import Skips
from ptdmpi.train.saving import Saving
from ptdmpi.train.standing import standing_of
from ptdmpi.train.tasks import Tasks
from ptdmpi.train.validation import Validation
from ptdmpi.watch.lookout import Lookout
from ptdmpi.watch.profile import Profile
from ptdmpi.watch.requests import STOPPED_EXIT_CODE, Asked, Save, StopRequest


class Loop:
    """One rank of a training run, from configuration to the last checkpoint.

    What it says and records is the journal's, who watches over it the lookout's, when it saves
    `Saving`'s: here stands only what follows what.
    """

    def __init__(
        self,
        config: Config,
        world: World,
        signals: StopRequest,
        handover: Handover | None = None,
    ) -> None:
        """`handover`: what survivors of a lost rank bring; else as `checkpoint.resume` says."""
        self.config, self.world = config, world
        torch.set_num_threads(config.run.threads)
        keep_freed(os.environ)
        device = device_of(world)
        self.axes = world.split(grid_of(config), wire_named(config.comm.wire, device))
        self.journal = Journal(config, self.axes, signals.show)
        if self.axes.carried_by:
            self.journal.say(self.axes.carried_by)
        self.lookout = Lookout(config, self.axes, world, signals, self.journal.say)
        try:
            self._set_up(handover, device)
        except Exception:
            self.lookout.close()  # nobody else knows of it
            raise
        give_back()

    def _set_up(self, handover: Handover | None, device: torch.device) -> None:
        config, world = self.config, self.world
        world.on_root(self.lookout.take_lock)
        self.feed = Feed(config, self.axes, device)
        vocab_size = self.feed.vocab_size
        self.memory = Memory(config, vocab_size, world, device)
        with self.memory.explained():
            self.engine = Engine(config, self.axes, vocab_size, device, self.lookout.place)
        names, say = self.lookout.ranks.name, self.journal.say
        self.profile = Profile(config.run, world.rank, device, say)
        self.skips = Skips(self.engine, names, config.run.max_skips, say)
        checkpoints = Checkpoints(
            Path(config.run.dir) / "checkpoints", self.engine.state, self.axes, self.feed.course
        )
        start = handover or Handover(config.checkpoint.resume)
        self.attempt = Attempt(world, self.engine, checkpoints, start)
        # the last step that was trained, and the last one of which nothing is left to be done
        self.completed: Completed | None = start.unfinished
        self.concluded = self.first - (self.completed is not None)
        standing = world.on_root(lambda: standing_of(config, self.concluded))
        self.attempt.over = standing.over
        checkpoints.validated = standing.last
        if not self.attempt.idle:
            checkpoints.check_space()
        self.journal.directory = self.attempt.open(self.concluded, self.journal.show)
        self.attempt.choose(device, self.memory, say)
        self.saving = Saving(checkpoints, config.run.steps, say, self.journal.keep)
        tasks = Tasks(self.engine, self.feed.course, world, self.journal)
        self.validation = Validation(config, self.feed, self.engine, tasks, self._vote, standing)
        if handover is None:
            for line in (*self.attempt.lines(vocab_size), *self.feed.source.told()):
                say(line)
        for problem in self.attempt.skipped:
            say(f"stepped over checkpoint {problem}")
        peak = agreed_peak_flops(config, self.axes, device)
        if peak is None:
            precision = config.precision.compute
            say(f"no MFU: no data sheet's {precision} peak is known of {device_name(device)}")
        self.journal.rates = Rates(config, vocab_size, world.size, peak)

    @property
    def first(self) -> int:
        """How many steps were done before this loop."""
        return self.attempt.first

    def run(self) -> None:
        """Every step from where the run stands to the last one, or to the one after which
        `run.stop_after_worse` ends it.

        Raises SystemExit on every rank: 75 after saving, if one was asked to stop before the last
        step; 1 if too many steps in a row were not finite.
        """
        with choice.computing_by(self.attempt.ways), self.attempt.told(lambda: self.concluded):
            if not self.attempt.idle:
                self._train()
            self.lookout.finish()
            self.attempt.finish(self.concluded)

    def _train(self) -> None:
        steps = self.config.run.steps
        with contextlib.closing(self.feed.steps(self.first)) as feed:
            self.lookout.place.enter("training")
            if self.completed is not None:  # a rank was lost between this step's update and its end
                self._conclude(self.completed)
            asked = self._vote()  # while the run was starting
            if asked.stop and self.attempt.live:
                asked = self._save(self.first, asked)
            self._stop_if(asked, self.first)
            for step in range(self.first, steps):
                if self.validation.standing.over:
                    self._end_early()
                    break
                result, batches, elapsed = self._step(step, feed)
                # without spans: after a loss it travels to other ranks, marks are of a device
                self.completed = Completed(step + 1, replace(result, watch=None), elapsed)
                self._conclude(self.completed, batches)
        self.journal.keep_timeline(self.concluded)

    def close(self) -> None:
        """End all threads without the other ranks, of which some may be lost."""
        self.lookout.heartbeat.close()
        self.saving.checkpoints.close()
        self.journal.close()
        self.lookout.close()  # the directory is another run's only when nothing is written any more

    def _step(self, step: int, feed: Prefetcher) -> tuple[StepResult, list[Batch], float]:
        self.lookout.place.step = step + 1
        watch = self.engine.stopwatch()
        begin = time.perf_counter()
        with watch.span("data"):
            batches = self.feed.place(next(feed))
        with self.memory.explained(), self.profile.step(step + 1):
            result = self.engine.step(step, batches)
        elapsed = time.perf_counter() - begin
        watches = [one for one in (watch, result.watch) if one is not None]
        self.journal.recent.add(elapsed, watches, result.inside_s)
        self.lookout.computed(result.compute_s, elapsed)
        return result, batches, elapsed

    def _conclude(self, done: Completed, batches: Sequence[Batch] | None = None) -> None:
        """What follows a step: its record, and what is due of validation, saving, stopping."""
        step, steps = done.step, self.config.run.steps
        # first of all: it also brings the memory of all ranks, which the record has
        asked = self._vote()
        self._record(done, asked)
        if batches is not None:
            self.skips.after(step - 1, done.result, batches)
        if self.validation.due(step) and not asked.stop:
            asked = self.validation.after_step(step)
            self.saving.checkpoints.validated = self.validation.standing.last
        asked = self._save(step, asked)
        if self.config.run.on_failure == "shrink":
            self.axes.world.barrier()  # whoever is through knows that rank 0 has kept the record
        self.concluded = step
        if step < steps and not self.validation.standing.over:
            self._stop_if(asked, step)

    def _end_early(self) -> None:
        """The run is done, for it does not get better; its last state is saved."""
        why = self.validation.standing.over
        self.lookout.stops()
        self.attempt.why = f"stopped early: {why}"
        self.journal.say(f"stopped early after step {self.concluded}: {why}")

    def _vote(self) -> Asked:
        """What the ranks want next; the same on all of them."""
        return self.lookout.vote(peak_memory_bytes(self.engine.device))

    def _record(self, done: Completed, asked: Asked) -> None:
        """The record of a step, and its line."""
        slow, course = self.lookout.slow_ranks(done.step), self.feed.course
        self.journal.step(
            done,
            self.lookout.usual_s(done.elapsed_s),
            tokens=course.tokens(done.step),
            **course.drawn(done.step),
            peak_memory_bytes=asked.peak_memory_bytes,
            vocab_size=self.feed.vocab_size,
            **({"slow_ranks": slow} if slow else {}),
        )

    def _save(self, step: int, asked: Asked) -> Asked:
        """Save if it is due or asked for; returns what the ranks want by then."""
        if asked.stop and step < self.config.run.steps:
            code = STOPPED_EXIT_CODE
            self.lookout.stops()
            self.attempt.why = f"stopped: {asked.stop}"
            self.journal.say(f"{asked.stop}: saving after step {step}, then exit code {code}")
        self.lookout.place.enter("saving")
        saved = self.saving.after_step(step, Save.NOW if asked.stop else asked.save)
        self.lookout.place.enter("training")
        if not saved:
            return asked
        self.lookout.requests.saved(self.saving.last_write_s)
        self.lookout.obeyed("SAVE")
        return self._vote()

    def _stop_if(self, asked: Asked, step: int) -> None:
        if not asked.stop:
            return
        self.lookout.obeyed("STOP")
        anew = self.config.checkpoint.resume == "never"
        then = 'checkpoint.resume = "auto" goes on' if anew else "the same command goes on"
        self.lookout.stops()
        reason = "" if self.attempt.why else f"{asked.stop}: "  # told once
        self.attempt.why = f"stopped: {asked.stop}"
        self.journal.say(f"{reason}stopped on request after step {step}; {then}")
        self.lookout.finish()
        raise SystemExit(STOPPED_EXIT_CODE)
