"""The training loop: batch -> engine -> meter, validation, checkpoints, the run directory."""

import contextlib
import math
import os
import statistics
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ptdmpi.checkpoint.save import Checkpoints
from ptdmpi.comm.world import World
from ptdmpi.config import Config, InputError, resolve, to_toml
from ptdmpi.data.batches import Prefetcher
from ptdmpi.inference.model import device_of
from ptdmpi.model.parameters import PRECISIONS
from ptdmpi.model.stage import Batch
from ptdmpi.plan.layout.grid import grid_of
from ptdmpi.plan.machine.cluster import load_cluster
from ptdmpi.plan.shape.parameters import parameter_count
from ptdmpi.sinks.sinks import require
from ptdmpi.train.capacity import Memory
from ptdmpi.train.engine import Engine, StepResult, Sums
from ptdmpi.train.feed import Feed, open_datasets, sample_order
from ptdmpi.train.live import Completed, Handover
from ptdmpi.train.meter import (
    Rates,
    RunDirectory,
    duration,
    peak_flops,
    peak_memory_bytes,
    validation_record,
)
from ptdmpi.train.nonfinite import Skips
from ptdmpi.train.recent import RecentSteps
from ptdmpi.train.saving import Saving
from ptdmpi.watch.heartbeat import COMPUTE_STEPS, Heartbeat, Judge
from ptdmpi.watch.lock import RunLock
from ptdmpi.watch.requests import STOPPED_EXIT_CODE, Asked, Requests, StopRequest
from ptdmpi.watch.stopwatch import Place, Stopwatch
from ptdmpi.watch.whereabouts import Ranks, slow_ranks

# A rank is slow if its own work takes so many times that of the others; told once in a while.
SLOW_FACTOR = 1.3
SLOW_EVERY_S = 300.0


class Loop:
    """One rank of a training run, from configuration to the last checkpoint."""

    def __init__(
        self,
        config: Config,
        world: World,
        signals: StopRequest,
        handover: Handover | None = None,
    ) -> None:
        """`handover`: what survivors of a lost rank bring; else as `checkpoint.resume` says."""
        self.world, self.config = world, config
        torch.set_num_threads(config.run.threads)
        self.device = device_of(world)
        self.axes = world.split(grid_of(config))
        self.path = Path(config.run.dir)
        self.directory: RunDirectory | None = None
        self.lock: RunLock | None = None
        self.place = Place()
        hosts = [place.host for place in world.places]
        self.ranks = Ranks(self.axes.grid, hosts)
        self.requests = Requests(signals, self.path, hosts, config.run.max_minutes)
        self.judge = Judge(self.ranks, config.run.stall_s, self.say) if world.rank == 0 else None
        self.heartbeat = Heartbeat(
            self.axes, self.ranks, self.place, signals, self.path, self.judge, config.run.stall_s
        )
        if not self.heartbeat.start():
            self.say("warning: this MPI has no MPI_THREAD_MULTIPLE: hangs will not be explained")
        world.last_words = self.heartbeat.failed
        try:
            self._set_up(handover)
        except Exception:
            self.heartbeat.close()  # nobody else knows of these two
            self._let_go()
            raise

    def _set_up(self, handover: Handover | None) -> None:
        config, world = self.config, self.world
        world.on_root(self._take_lock)
        self.feed = Feed(config, self.axes, self.device)
        self.memory = Memory(config, self.feed.vocab_size, world, self.device)
        with self.memory.explained():
            self.engine = Engine(config, self.axes, self.feed.vocab_size, self.device, self.place)
        self.skips = Skips(self.engine, self.ranks.name, config.run.max_skips, self.say)
        self.checkpoints = Checkpoints(self.path / "checkpoints", self.engine, config.checkpoint)
        start = handover or Handover(config.checkpoint.resume)
        self.first, skipped = self._restore(start)
        self.live = start.load is not None  # so no checkpoint may have it
        # the last step that was trained, and the last one of which nothing is left to be done
        self.completed: Completed | None = start.unfinished
        self.concluded = self.first - (self.completed is not None)
        if self.first < config.run.steps:
            self.checkpoints.check_space()
        if world.rank == 0:
            self.directory = RunDirectory(self.path, to_toml(config), self.concluded)
            if self.first < config.run.steps:
                self.directory.open_sinks(config)
        self.saving = Saving(self.checkpoints, config.run.steps, self.say, self._keep_record)
        if handover is None:
            self._greet()
        for problem in skipped:
            self.say(f"stepped over checkpoint {problem}")
        self.rates = Rates(config, self.feed.vocab_size, world.size, self._peak())
        self.bigram_pending = config.log.bigram_baseline and bool(self.feed.valid)
        self.recent = RecentSteps(self.axes)
        self.durations: deque[float] = deque(maxlen=100)
        self.told_slow_s = -math.inf
        # there the system's scheduler makes ranks slow, now this one and now that
        self.shares_cores = world.local_size * config.run.threads > (os.cpu_count() or 1)

    def _restore(self, start: Handover) -> tuple[int, list[str]]:
        """Load the state; returns how many steps are done, and what was stepped over."""
        skipped: list[str] = []
        self.begun_from: str | None = None
        self.engine.steps_done = None
        if start.load is None:
            progress, skipped = self.checkpoints.resume(start.resume)
            step = progress.step if progress else 0
            initial = self.config.checkpoint.initial
            if progress is None and initial is not None:
                self.begun_from = self.checkpoints.begin_from(Path(initial))
        else:
            step = start.load(self.engine)
        self.engine.steps_done = step
        return step, skipped

    def run(self) -> None:
        """Every step from where the run stands to the last one.

        Raises SystemExit on every rank: 75 after saving, if one was asked to stop before the last
        step; 1 if too many steps in a row were not finite.
        """
        steps = self.config.run.steps
        with contextlib.closing(self.feed.steps(self.first)) as feed:
            self.place.enter("training")
            if self.completed is not None:  # a rank was lost between this step's update and its end
                self._conclude(self.completed)
            asked = self._vote()  # while the run was starting
            if asked.stop and self.live:
                asked = self._save(self.first, asked)
            self._stop_if(asked, self.first)
            for step in range(self.first, steps):
                result, batches, elapsed = self._step(step, feed)
                self.completed = Completed(step + 1, replace(result, spans=[]), elapsed)
                self._conclude(self.completed, batches)
        self.recent.keep(self.path / "timeline", steps, self.say)
        self.place.enter("ending")
        self.heartbeat.finish()
        self.world.on_root(lambda: self.directory.finish(steps))

    def _take_lock(self) -> None:
        """Rank 0 alone. Before anything is read: what another run is writing now may be gone."""
        self.lock = RunLock(self.path, lambda line: print(line, flush=True))

    def close(self) -> None:
        """End all threads without the other ranks, of which some may be lost."""
        self.heartbeat.close()
        self.checkpoints.close()
        if self.directory:
            self.directory.close()
        self._let_go()

    def _let_go(self) -> None:
        if self.lock is not None:
            self.lock.close()
            self.lock = None

    def _step(self, step: int, feed: Prefetcher) -> tuple[StepResult, list[Batch], float]:
        self.place.step = step + 1
        watch = Stopwatch(self.axes["pipeline"].rank, self.place)
        begin = time.perf_counter()
        with watch.span("data"):
            batches = self.feed.place(next(feed))
        with self.memory.explained():
            result = self.engine.step(step, batches)
        elapsed = time.perf_counter() - begin
        computed = sum(s.end_s - s.start_s for s in result.spans if s.computes)
        tensor_s = computed - result.compute_s
        self.recent.add(elapsed, watch.spans + result.spans, tensor_s)
        self.heartbeat.compute_s.append(result.compute_s)
        self.requests.stepped(elapsed)
        return result, batches, elapsed

    def _conclude(self, done: Completed, batches: Sequence[Batch] | None = None) -> None:
        """What follows a step: its record, and what is due of validation, saving, stopping."""
        step, steps = done.step, self.config.run.steps
        self.durations.append(done.elapsed_s)
        asked = self._vote()
        self._record(step, done.result, done.elapsed_s, asked.peak_memory_bytes)
        if batches is not None:
            self.skips.after(step - 1, done.result, batches)
        due = _due(step, self.config.log.validate_every_steps, steps)
        if due and self.feed.valid and not asked.stop:
            asked = self._validate(step)
        asked = self._save(step, asked)
        if self.config.run.on_failure == "shrink":
            self.axes.world.barrier()  # whoever is through knows that rank 0 has kept the record
        self.concluded = step
        if step < steps:
            self._stop_if(asked, step)

    def _vote(self) -> Asked:
        """What the ranks want next; the same on all of them."""
        stop, save = self.requests.mine(self.world.rank)
        values = (stop, save, peak_memory_bytes(self.device))
        stop, save, memory = self.axes.world.greatest(values)
        return Asked(self.requests.reason(stop), bool(save), memory)

    def _save(self, step: int, asked: Asked) -> Asked:
        """Save if it is due or asked for; returns what the ranks want by then."""
        if asked.stop and step < self.config.run.steps:
            code = STOPPED_EXIT_CODE
            self.say(f"{asked.stop}: saving after step {step}, then exit code {code}")
        self.place.enter("saving")
        saved = self.saving.after_step(step, now=bool(asked.stop or asked.save))
        self.place.enter("training")
        if not saved:
            return asked
        self.requests.saved(self.saving.last_write_s)
        if self.directory:
            self.requests.obeyed("SAVE")
        return self._vote()

    def _stop_if(self, asked: Asked, step: int) -> None:
        if not asked.stop:
            return
        if self.directory:
            self.requests.obeyed("STOP")
        anew = self.config.checkpoint.resume == "never"
        then = 'checkpoint.resume = "auto" goes on' if anew else "the same command goes on"
        self.say(f"{asked.stop}: stopped on request after step {step}; {then}")
        self.place.enter("ending")
        self.heartbeat.finish()
        raise SystemExit(STOPPED_EXIT_CODE)

    def _record(self, step: int, result: StepResult, elapsed: float, memory: int) -> None:
        config = self.config
        if self.directory is None:
            return
        slow = self._slow_ranks(step)
        rates = self.rates.of(elapsed)
        order = {} if result.order_loss is None else {"sentence_order_loss": result.order_loss}
        self.judge.step_s = max(self.durations)
        self.directory.record(
            step=step,
            loss=result.loss,
            **order,
            grad_norm=result.grad_norm,
            learning_rate=result.learning_rate,
            loss_scale=result.loss_scale,
            skipped=result.skipped,
            tokens=step * self.rates.tokens,
            **self.feed.drawn(step),
            **rates,
            peak_memory_bytes=memory,
            rank_count=self.world.size,
            layout=str(config.layout),
            vocab_size=self.feed.vocab_size,
            **({"slow_ranks": slow} if slow else {}),
        )
        if step % config.log.every_steps == 0 or step == config.run.steps:
            left = (config.run.steps - step) * statistics.median(self.durations)
            self.say(
                f"step {step:>{len(str(config.run.steps))}}/{config.run.steps}  "
                f"loss {result.loss:7.4f}  grad norm {result.grad_norm:6.3f}  "
                f"lr {result.learning_rate:.2e}  {rates['tokens_per_s']:,.0f} tokens/s  "
                f"{rates['model_tflops_per_rank']:.3f} TFLOP/s/rank  mfu {rates['mfu']:.1%}  "
                f"left {duration(left)}{'  skipped: overflow' if result.overflow else ''}"
            )

    def _slow_ranks(self, step: int) -> list[dict[str, Any]]:
        """Which ranks compute slowly, for the record of a step; also told, once in a while."""
        if step % COMPUTE_STEPS or self.shares_cores:
            return []
        found = slow_ranks(self.judge.compute_s(), self.axes.grid, SLOW_FACTOR)
        slow = [
            {"rank": rank, "host": self.ranks.hosts[rank], "factor": round(factor, 2)}
            for rank, factor in found
        ]
        now = time.monotonic()
        if slow and now - self.told_slow_s >= SLOW_EVERY_S:
            self.told_slow_s = now
            text = ", ".join(f"{self.ranks.name(r)} {factor:.2f} times" for r, factor in found[:8])
            self.say(f"slow in computing, against ranks with the same work: {text}")
        return slow

    def _validate(self, step: int) -> Asked:
        sums = [Sums() for _ in self.feed.valid]
        self.place.enter("validation")
        for number, group in self.feed.validation():
            sums[number] += self.engine.evaluate(self.feed.place(group))
            asked = self._vote()
            if asked.stop:
                self.say(f"{asked.stop}: validation after step {step} broken off")
                return asked
        values, text = validation_record(self.config.data.valid_paths, sums)
        if self.bigram_pending:
            values["bigram_validation_loss"] = self.feed.bigram_loss()
            text += f"  (bigram model: loss {values['bigram_validation_loss']:.4f})"
            self.bigram_pending = False
        self._keep_record(step=step, **values)
        self.say(f"step {step}  {text}")
        self.place.enter("training")
        return asked

    def _peak(self) -> float:
        precision = self.config.precision.compute
        mine = peak_flops(self.device, PRECISIONS[precision].compute, precision)
        return statistics.median(self.axes.world.all_gather_object(mine))

    def _greet(self) -> None:
        config, world = self.config, self.world
        parameters = parameter_count(config.model, self.feed.vocab_size)
        self.say(
            f"{world.size} ranks on {world.nodes} node{'s' * (world.nodes > 1)}, "
            f"{config.layout}, {config.parallel.schedule}, {config.precision.compute}; "
            f"{parameters / 1e6:,.1f}M parameters, vocabulary {self.feed.vocab_size}; "
            f"{config.run.steps} steps of {config.batch.global_size} x {config.model.seq_length} "
            "tokens"
        )
        if self.first > config.run.steps:
            self.say(f"step {self.first} was trained before; run.steps = {config.run.steps}")
        elif self.first:
            followed = self.checkpoints.followed
            again = f", for checkpoint.resume = {followed} was followed before" if followed else ""
            self.say(f"resumed after step {self.first}{again}")
        elif self.begun_from:
            self.say(f"begins from the weights of {self.begun_from}")
        if world.tensor_axis_crosses_nodes(self.axes.grid):
            self.say(
                "warning: the tensor axis crosses nodes; every layer waits for the network. "
                f"Ranks per node should be a multiple of parallel.tensor = {config.parallel.tensor}"
            )

    def _keep_record(self, **values: Any) -> None:
        if self.directory:
            self.directory.record(**values)

    def say(self, line: str) -> None:
        if self.directory:
            self.directory.say(line)
        elif self.world.rank == 0:
            print(line, flush=True)


def checked(tree: dict[str, Any], ranks: int) -> Config:
    """All that can be wrong before memory is allocated, found by one rank for everyone."""
    config = resolve(tree, ranks)
    require(config.log)
    checked_data(config)
    return config


def checked_data(config: Config) -> int:
    """The size of the vocabulary, of data, cluster file and run directory that can be used."""
    train, _ = open_datasets(config)
    sample_order(config, train)
    if config.run.cluster:
        load_cluster(config.run.cluster)
    path = Path(config.run.dir)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"run.dir = {path}: {error.strerror}") from None
    return train[0].vocab_size


def _due(step: int, every: int, last: int) -> bool:
    return step == last or (every > 0 and step % every == 0)
