"""One start of a run: what it goes on from, what it says of that, and what is kept of it."""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from ptdmpi.base.words import counted, short
from ptdmpi.checkpoint.base import base_told, take_base
from ptdmpi.checkpoint.save import Checkpoints
from ptdmpi.comm.world import World
from ptdmpi.config import SharedInputError, to_toml
from ptdmpi.config.legality import dear
from ptdmpi.config.methods import told
from ptdmpi.engine.engine import Engine
from ptdmpi.inference.tokenizer import known_tokenizer
from ptdmpi.lineage.attempts import History
from ptdmpi.lineage.judge import FROM_HERE
from ptdmpi.model.kernels import choice
from ptdmpi.model.parameters import data_types
from ptdmpi.plan.layout.grid import grid_of
from ptdmpi.plan.layout.topology import topology_of
from ptdmpi.plan.shape.parameters import parameter_count, rank_elements
from ptdmpi.train.capacity import Memory
from ptdmpi.train.live import Handover
from ptdmpi.train.meter import RunDirectory, mark_done


def _measured(cluster: str) -> dict[str, list[dict[str, Any]]]:
    """Which ways of computing a cluster file names as the quickest."""
    if not cluster:
        return {}
    # the planner, which a run without a cluster has no use for
    from ptdmpi.plan.machine.cluster import load_cluster

    return load_cluster(cluster).kernels.entries()


class Attempt:
    """Made by all ranks together; rank 0 keeps the history.

    `first`: steps that were done before. `over`: why the run has ended before its last step, once
    it has. `idle`: nothing is left to train, so nothing is written. `ways`: how attention is
    computed (`choice`).
    """

    def __init__(
        self, world: World, engine: Engine, checkpoints: Checkpoints, start: Handover
    ) -> None:
        self.config = config = engine.config
        self.world, self.checkpoints = world, checkpoints
        # kernels that `ptdmpi probe` has measured on this machine
        self.own = world.on_root(lambda: _measured(config.run.cluster))
        self.course = checkpoints.course
        self.path = Path(config.run.dir)
        self.live = start.load is not None  # so no checkpoint may have the state yet
        self.skipped: list[str] = []  # checkpoints that were stepped over, and why
        self.how = "begins"
        self.why = self.over = ""
        # until all is loaded: a rank that is lost meanwhile must not be replaced by half a state
        engine.steps_done = None
        fresh: list[str] = []  # of a head for a task, what no base has
        if config.adapt.adapts:
            known = world.on_root(lambda: known_tokenizer(Path(config.adapt.base)))
            fresh = take_base(engine.state, engine.axes.world, self.course, known)
        self.first = (
            self._from_checkpoint(start, fresh) if start.load is None else start.load(engine)
        )
        if start.load is not None:
            self.how = f"goes on from live state of step {self.first}"
            if start.answer is not None:
                self.course.go_on(start.answer)
        world.on_root(self.course.check)
        engine.steps_done = self.first
        self.pending = start.unfinished is not None  # the last step's record and save
        self.history: History | None = None
        self.ways: choice.Ways = {}

    def choose(self, device: torch.device, memory: Memory, say: Callable[[str], None]) -> None:
        """Settle on all ranks by which kernels it is computed, if anything is trained, as far as
        memory holds what they need."""
        if not self.idle:
            computing = (device, data_types(self.config.precision.compute).compute)
            before = None if self.config.run.kernels == "anew" else self.course.kernels
            self.ways = choice.agreed(self.world, self.path, computing, before, say, self.own)
            self.course.kernels = self.ways
            self.ways = memory.settle(self.ways, say)

    @property
    def idle(self) -> bool:
        return not self.pending and (bool(self.over) or self.first >= self.config.run.steps)

    def _from_checkpoint(self, start: Handover, fresh: list[str]) -> int:
        """Load what `checkpoint.resume` and `checkpoint.initial` ask for; returns how many steps
        are done. `fresh`: parameters of a head that begin as they were drawn, unless those ask for
        others. Raises InputError on every rank."""
        checkpoints, steps = self.checkpoints, self.config.run.steps
        progress, self.skipped = checkpoints.resume(start.resume, start.lost)
        if progress is not None:
            if progress.step >= steps and checkpoints.branches:
                raise SharedInputError(
                    f"checkpoint.resume = {start.resume}: {progress.step} steps are trained, and "
                    f"run.steps = {steps}: nothing is left to do; legal: run.steps above "
                    f"{progress.step}"
                )
            self.how = f"resumed after step {progress.step}"
            if checkpoints.mean_of:
                self.how += f", from the mean of its {checkpoints.mean_of} replicas"
            if checkpoints.followed:
                self.how += f", for checkpoint.resume = {checkpoints.followed} was followed before"
            return progress.step
        if self.config.checkpoint.initial is not None:
            initial = Path(self.config.checkpoint.initial)
            known = self.world.on_root(lambda: known_tokenizer(initial))
            found, fresh = checkpoints.begin_from(initial, known, fresh)
            self.how = f"begins from the weights of {found}"
        if fresh:
            self.how += f"; drawn from run.seed: {', '.join(fresh)}"
        return 0

    def open(self, concluded: int, show: Callable[[str], None]) -> RunDirectory | None:
        """Rank 0's run directory, which prints by `show`, with what the new steps are trained on;
        `concluded` steps have their records. None where nothing is left to train. Raises
        InputError."""
        if self.idle or self.world.rank:
            return None
        directory = RunDirectory(self.path, to_toml(self.config), concluded, show)
        self.history = History(self.path)
        changed = list(self.course.answer.changed)
        self._keep(
            lambda history: history.begin(
                how=self.how,
                first=self.first,
                ranks=self.world.size,
                layout=str(self.config.layout),
                changed=changed,
                trained_on=self.course.trained_on.as_json(),
                config=self.config.model_dump(mode="json"),
            )
        )
        directory.open_sinks(self.config)
        if changed and self.first < self.config.run.steps:
            directory.record(step=self.first + 1, changed=changed)
        return directory

    @contextlib.contextmanager
    def told(self, done: Callable[[], int]) -> Iterator[None]:
        """Keep how it ended, and after how many steps, as `done()` says then."""
        why = "done"
        try:
            yield
            why = self.why or why
        except SystemExit as stop:
            why = self.why or f"exit code {stop.code}"
            raise
        except BaseException as error:
            why = f"failed: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
            raise
        finally:
            self._keep(lambda history: history.end(done(), why))

    def _keep(self, work: Callable[[History], None]) -> None:
        """A disk that fails does not end a run."""
        if self.history is not None and self.path.is_dir():
            try:
                work(self.history)
            except OSError as error:
                text = f"ptdmpi: warning: {self.history.path}: {error.strerror}"
                print(text, file=sys.stderr, flush=True)

    def finish(self, last: int) -> None:
        """On all ranks: say in the run directory that the run is done after the step `last`, where
        it does not yet."""
        if not self.idle or self.over or self.first == self.config.run.steps:
            self.world.on_root(lambda: mark_done(self.path, last))

    def lines(self, vocab_size: int) -> Iterator[str]:
        """What is said at the start."""
        config, world = self.config, self.world
        parameters = parameter_count(config.model, vocab_size)
        layers = config.model.layers
        whole = (layers, (True, True), 1, config.model.idle())
        _, train, _ = rank_elements(config.model, vocab_size, *whole)
        if not self.idle:
            yield (
                f"to stop and keep all: kill -USR1 {os.getpid()} on {world.host}, or "
                f"touch {self.path / 'STOP'}{', or Ctrl-C' if world.size == 1 else ''}"
            )
        layout = config.layout
        how = ", ".join(filter(None, (config.parallel.schedule, layout.sharding)))
        yield (
            f"{counted(world.size, 'rank')} on {counted(world.nodes, 'node')}, "
            f"{layout}, {how}, {config.precision.compute}; "
            f"{short(parameters)} parameters, "
            f"{f'of which {short(train)} train, ' if config.adapt.adapts else ''}"
            f"vocabulary {vocab_size}; "
            f"{counted(config.run.steps, 'step')} of {config.batch.global_size} x "
            f"{config.model.seq_length} tokens"
        )
        yield from base_told(config)
        if config.data_parallel.method == "decentralized":
            yield f"replicas average with neighbours: {topology_of(config).told}"
        if world.tensor_axis_crosses_nodes(grid_of(config)):
            yield (
                "warning: the tensor axis crosses nodes; every layer waits for the network. "
                f"Ranks per node should be a multiple of parallel.tensor = {config.parallel.tensor}"
            )
        yield from dear(layout, config.batch.global_size)
        yield from filter(None, [told(config.data_parallel)])
        answer = self.course.answer
        changed = f"; changed since: {'; '.join(answer.changed)}" if answer.changed else ""
        if self.idle:
            asked = self.over or f"run.steps = {config.run.steps}"
            legal = (
                "a higher run.stop_after_worse, or 0"
                if self.over
                else f"run.steps above {self.first}"
            )
            yield (
                f"step {self.first} was trained before; {asked}: nothing is left to do, and "
                f"nothing is written{changed}; legal: {legal}"
            )
            return
        if self.how != "begins":
            yield self.how + changed
            if config.checkpoint.initial and self.how.startswith("resumed"):
                yield "checkpoint.initial is not used: the run goes on from its own state"
        if answer.note:
            yield answer.note
        if answer.trained_on.last.step == self.first > 0:
            here = f"from step {self.first + 1} (sample {self.course.samples(self.first)}) on"
            yield f'data.change = "{FROM_HERE}": another order of samples holds {here}'
