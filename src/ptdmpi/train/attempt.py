"""One attempt of a run. An attempt is one start of the training. This module determines the state
from which the attempt begins, its first log lines, and its entries in the history file."""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from ptdmpi.base.launched import is_supervised, launcher_kills
from ptdmpi.base.words import counted, short
from ptdmpi.checkpoint.base import base_told, take_base
from ptdmpi.checkpoint.memory import MemoryCopies
from ptdmpi.checkpoint.save import Checkpoints
from ptdmpi.comm.world import World
from ptdmpi.config import Config, InputError, SharedInputError, to_toml
from ptdmpi.config.legality import dear
from ptdmpi.config.methods import said_at_start
from ptdmpi.engine.engine import Engine
from ptdmpi.engine.prepare.compiling import compile_layers, lacking, may_compile, measured
from ptdmpi.lineage.attempts import History
from ptdmpi.lineage.judge import FROM_HERE
from ptdmpi.model.kernels import agreement
from ptdmpi.model.kernels.agreement import Choice, DeviceChoice, RunPlace
from ptdmpi.model.kernels.choice import BY_PYTORCH, Entries
from ptdmpi.model.kernels.timing.here import measured_here, sizes_of
from ptdmpi.model.parameters import data_types
from ptdmpi.plan.layout.grid import grid_of
from ptdmpi.plan.layout.topology import topology_of
from ptdmpi.plan.shape.parameters import parameter_count, trained_count
from ptdmpi.train.capacity import Memory
from ptdmpi.train.live import Handover
from ptdmpi.train.records.arithmetic import agree
from ptdmpi.train.records.directory import DONE, RunDirectory, mark_done
from ptdmpi.train.standing import require_no_saves

# the beginning of the line about a run that cannot use compiled layers any more
NO_LONGER = "layers not compiled, unlike before, so the bits of results change"


def _measured(config: Config) -> Entries:
    """Return the kernels that were fastest in earlier measurements. The measurements are in the
    file that `run.kernels` names; if this key names no file, they are in the cluster file that
    `run.cluster` names. Return {} if neither key names a file, or if the file has no measurements
    of kernels. If `run.kernels` is "default", return PyTorch's own kernels."""
    wish = config.run.kernels
    if wish == "default":
        return BY_PYTORCH
    path = wish if wish.endswith(".toml") else config.run.cluster
    if not path:
        return {}
    # imported only here, because a run without a cluster file does not need this module
    from ptdmpi.plan.machine.cluster import load_cluster, load_kernels

    if path == wish:
        return load_kernels(path).entries()
    return load_cluster(path).kernels.entries()


def _tokenizer_of(model: Path) -> str | None:
    """Return the SHA-256 of the tokenizer of the model at the path `model`; None if it is not
    known."""
    # imported only here, because a run that begins from no other model does not need this module
    from ptdmpi.inference.tokenizer import known_tokenizer

    return known_tokenizer(model)


class Attempt:
    """One attempt of a run: one start of the training on all ranks. Rank 0 writes the history file.

    `first` is the number of steps that were trained before this attempt. If `idle` is True, nothing
    is left to train, and this attempt writes nothing. `over` is the reason why the run has ended
    before its last step; it is empty if the run has not ended early. `how` describes the state from
    which this attempt begins. `why` is the reason why the attempt ended; it is empty until then.
    `event` is the name of this end, such as "stopped", in the messages to the receivers of
    `log.notify`. `live` is True if the state came from the memory of ranks that survived a loss of
    other ranks; such a state may be newer than all checkpoints. `skipped` lists the checkpoints
    that could not be read, with the reasons. `choice` describes the kernels with which the engine
    computes; it is None until the method `choose` has chosen them.
    """

    def __init__(
        self,
        world: World,
        engine: Engine,
        checkpoints: Checkpoints,
        *,
        start: Handover,
        copies: MemoryCopies | None = None,
    ) -> None:
        """Load the training state into `engine`. Raises InputError, on every rank, if the state
        cannot be loaded."""
        config = engine.config
        self.config = config
        self.world = world
        self.checkpoints = checkpoints
        self.copies = copies
        self.course = checkpoints.course
        self.path = Path(config.run.dir)
        # the kernels that were fastest when `ptdmpi probe` measured a machine (see `_measured`)
        self.own = world.on_root(lambda: _measured(config))
        self.live = start.load is not None
        self.unwritten = start.unwritten
        self.skipped: list[str] = []
        self.how = "begins"
        self.why = ""
        self.event = "stopped"
        self.over = ""
        # True if the last step of the state is not completely recorded, validated and saved
        self.pending = start.unfinished is not None
        self.history: History | None = None
        self.directory: RunDirectory | None = None
        self.choice: Choice | None = None
        # `steps_done` of the engine is None until the state is completely loaded. If a rank is lost
        # during the loading, no survivor may continue from the incomplete state.
        engine.steps_done = None
        fresh: list[str] = []
        if config.adapt.adapts:
            known = world.on_root(lambda: _tokenizer_of(Path(config.adapt.base)))
            fresh = take_base(engine.state, engine.axes.world, self.course, known)
        if start.load is None:
            self.first = self._from_checkpoint(start, fresh)
        else:
            self.first = start.load(engine)
            self.how = f"continues from the live state of step {self.first}"
            if start.answer is not None:
                self.course.go_on(start.answer)
        world.on_root(self.course.check)
        engine.steps_done = self.first

    def choose(self, engine: Engine, memory: Memory, say: Callable[[str], None]) -> None:
        """Choose the kernels for the engine. The choice is the same on all ranks. Do nothing if no
        step is left to train.

        `memory` limits the choice to kernels whose working memory fits into the rank's memory.
        `say` is a function that prints a line.
        """
        if not self.idle:
            run = self.config.run
            compute = data_types(self.config.precision.compute).compute
            place = RunPlace(engine.device, compute, self.own)
            before = None if run.kernels == "anew" else self.course.kernels
            if self._measures_kernels(engine):
                sizes = sizes_of(self.config, engine.vocab_size)
                own = measured_here(self.world, engine.axes, sizes, compute, say=say)
                place = replace(place, own=own)
            agreed = agreement.agreed(self.world, self.path, place, before, say=say)
            self.course.kernels = agreement.stored(agreed)
            known = self.course.arithmetic
            self.course.arithmetic, lines = agree(self.world, engine.device, known)
            for line in lines:
                say(line)
            self.choice = memory.settle(agreed, say)
            engine.compute_by(self.choice)
            if may_compile(self.config, engine.device, self.world.size):
                assert isinstance(self.choice, DeviceChoice)
                self.choice = self._with_layers(engine, self.choice, say)
            elif isinstance(agreed, DeviceChoice) and agreed.compiled and run.compile == "auto":
                say(f"{NO_LONGER}: the settings exclude compiled layers")

    def _with_layers(
        self, engine: Engine, choice: DeviceChoice, say: Callable[[str], None]
    ) -> DeviceChoice:
        """Decide whether this run uses compiled layers, compile the engine's layers if it does, and
        return `choice` with this decision. At the first start of a run, and with `run.kernels` =
        "anew", all ranks measure whether compiled layers are faster. The run directory and the
        checkpoints store the result for later starts. If a resumed run has no stored result, its
        layers are not compiled. If a rank lacks the compiler, the layers are not compiled in this
        attempt, but the stored result remains."""
        compiled = choice.compiled
        if compiled is None and self.first and self.config.run.kernels != "anew":
            return choice
        if compiled is None:
            passes = (self.config.run.steps - self.first) * self.config.microbatches
            with agreement.trying(choice.attention):
                compiled, why = measured(
                    engine.stages, engine.axes.world, engine.device, passes=passes
                )
            engine.buffer.gradients.zero_()
            say(f"layers {'compiled' if compiled else 'not compiled'}: {why}")
        lacks = lacking(engine.axes.world, engine.device) if compiled else ""
        if lacks:
            say(f"{NO_LONGER}: {lacks}")
        elif compiled:
            compile_layers(engine.stages, engine.axes.world, engine.device)
        choice = replace(choice, compiled=compiled)
        self.course.kernels = agreement.stored(choice)
        problem = self.world.on_root(lambda: agreement.keep_layers(self.path, choice))
        if problem:
            say(problem)
        return choice

    def _measures_kernels(self, engine: Engine) -> bool:
        """Return True if this attempt must measure which kernels are fastest. Kernels are measured
        only on a CPU, and only if neither a checkpoint nor the run directory records the kernels of
        an earlier attempt. The configuration must also allow different kernels on different
        machines (`run.kernels` = "auto" and `run.reproducible` = false)."""
        run = self.config.run
        return (
            run.kernels == "auto"
            and not run.reproducible
            and engine.device.type == "cpu"
            and not self.course.kernels
            and not self.world.on_root(lambda: agreement.is_recorded(self.path))
        )

    def take_owed(self, owed: bool) -> None:
        """If `owed` is True and the run directory has no file `done`, set `pending` to True, so
        that this attempt does the missing work. `owed` is True if a stop has interrupted the
        validation or the evaluation of tasks after the last step. Every rank must call this
        method."""
        if owed and not self.world.on_root(lambda: (self.path / DONE).exists()):
            self.pending = True

    @property
    def idle(self) -> bool:
        """Return True if nothing is left to train, record or save."""
        return not self.pending and (bool(self.over) or self.first >= self.config.run.steps)

    def _from_checkpoint(self, start: Handover, fresh: list[str]) -> int:
        """Load the training state that the keys `checkpoint.resume` and `checkpoint.initial` name.
        Return the number of steps for which this state was trained.

        `fresh` lists the parameters of the task head that are not in the base model `adapt.base`.
        They keep their random initial values, unless a checkpoint contains them. Raises InputError,
        on every rank, if the state cannot be loaded.
        """
        if self.copies is not None:
            copied = self.checkpoints.resume_from_copy(self.copies, start.resume)
            if copied is not None:
                self.how = f"continues from the copy in memory of step {copied.step}"
                return copied.step
        progress, self.skipped = self.checkpoints.resume(start.resume, start.lost)
        if progress is None and start.resume == "auto":
            self.world.on_root(lambda: require_no_saves(self.config))
        if progress is not None:
            self.how = self._resumed(start.resume, progress.step)
            return progress.step
        if self.config.checkpoint.initial is not None:
            initial = Path(self.config.checkpoint.initial)
            known = self.world.on_root(lambda: _tokenizer_of(initial))
            checkpoint, fresh = self.checkpoints.begin_from(initial, known, fresh)
            self.how = f"begins from the weights of {checkpoint}"
        if fresh:
            self.how += f"; drawn from run.seed: {', '.join(fresh)}"
        return 0

    def _resumed(self, resume: str, step: int) -> str:
        """Return a text that describes how the run resumes after `step`. Raises InputError if
        `checkpoint.resume` names a checkpoint and no step is left to train."""
        checkpoints = self.checkpoints
        steps = self.config.run.steps
        if step >= steps and checkpoints.branches:
            raise SharedInputError(
                f"checkpoint.resume = {resume}: {step} steps are trained, and run.steps = {steps}: "
                f"nothing is left to do; legal: run.steps above {step}"
            )
        how = f"resumed after step {step}"
        if checkpoints.mean_of:
            how += f", from the mean of its {checkpoints.mean_of} replicas"
        if checkpoints.followed:
            how += f"; an earlier start resumed from checkpoint.resume = {checkpoints.followed}"
        return how

    def open(self, concluded: int, show: Callable[[str], None]) -> RunDirectory | None:
        """Open the run directory on rank 0, and record the beginning of this attempt in the
        history.

        `concluded` is the last step that is already recorded. `show` is a function that prints a
        line. Returns None on other ranks, and on all ranks if nothing is left to train. Raises
        InputError if the directory cannot be written to.
        """
        if self.idle or self.world.rank:
            return None
        directory = RunDirectory(
            self.path, to_toml(self.config), concluded, show, handed_over=self.unwritten
        )
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
        ranks = counted(self.world.size, "rank")
        directory.tell("begins", ranks if self.how == "begins" else f"{ranks}; {self.how}")
        self.directory = directory
        return directory

    @contextlib.contextmanager
    def recorded_end(self, steps_done: Callable[[], int]) -> Iterator[None]:
        """Return a context. At the end of the `with` block, the context writes to the history why
        the block ended, and how many steps were done. The context also sends a message about the
        end, with one exception. If the job has several ranks, and this rank fails with an error
        other than InputError, the heartbeat (a thread that monitors all ranks) sends the message,
        because the heartbeat ends the job and knows all failed ranks."""
        why = event = "done"
        try:
            yield
            if self.why:
                why, event = self.why, self.event
            self._warn_of_lost_lines()
        except SystemExit as stop:
            why, event = self.why or f"exit code {stop.code}", self.event if self.why else "failed"
            self._warn_of_lost_lines()
            raise
        except GeneratorExit:  # a user's program has left its loop over the steps
            self.why = why = "left before its last step"
            event = "stopped"
            self._warn_of_lost_lines()
            raise
        except BaseException as error:
            first_line, _, _ = str(error).partition("\n")
            why = f"failed: {type(error).__name__}: {first_line}"
            event = "failed" if self.world.size == 1 or isinstance(error, InputError) else ""
            raise
        finally:
            self._keep(lambda history: history.end(steps_done(), why))
            if self.directory is not None and event:
                self.directory.tell(event, "" if why == event else why)

    def _warn_of_lost_lines(self) -> None:
        # this method is not called after a loss of ranks, because the next attempt writes the
        # missing lines
        if self.directory is not None:
            self.directory.warn_of_lost_lines()

    def _keep(self, work: Callable[[History], None]) -> None:
        """Call the function `work`, which writes to the history. If the disk fails, print a warning
        and continue."""
        if self.history is not None and self.path.is_dir():
            try:
                work(self.history)
            except OSError as error:
                text = f"ptdmpi: warning: {self.history.path}: {error.strerror}"
                print(text, file=sys.stderr, flush=True)

    def finish(self, last: int) -> None:
        """Mark the run directory as done if the run is complete after step `last`. Every rank must
        call this method."""
        if not self.idle or self.over or self.first == self.config.run.steps:
            self.world.on_root(lambda: mark_done(self.path, last))

    def lines(self, vocab_size: int) -> Iterator[str]:
        """Yield the lines that a run logs at its start."""
        config = self.config
        if not self.idle:
            yield self._how_to_stop()
        yield self._size_line(vocab_size)
        if config.model.mup_base_hidden:
            yield (
                f"muP: {config.model.width_ratio:g} times as wide as model.mup_base_hidden = "
                f"{config.model.mup_base_hidden}"
            )
        yield from base_told(config)
        if config.data_parallel.method == "decentralized":
            yield f"replicas average with neighbours: {topology_of(config).description}"
        if self.world.tensor_axis_crosses_nodes(grid_of(config)):
            yield (
                "warning: the tensor axis crosses nodes; every layer waits for the network. "
                f"Ranks per node should be a multiple of parallel.tensor = {config.parallel.tensor}"
            )
        yield from dear(config.layout, config.batch.global_size)
        method = said_at_start(config.data_parallel)
        if method:
            yield method
        if self.idle:
            yield self._nothing_left()
        else:
            yield from self._beginning()

    def _how_to_stop(self) -> str:
        ways = [f"kill -USR1 {os.getpid()} on {self.world.host}", f"touch {self.path / 'STOP'}"]
        loss = ""
        if launcher_kills():
            loss = "; Ctrl-C loses the steps since the last save (under `ptdmpi run` it saves)"
        elif self.world.size == 1 or is_supervised():
            ways.append("Ctrl-C")
        return f"to save and stop: {', or '.join(ways)}{loss}"

    def _size_line(self, vocab_size: int) -> str:
        """Return the log line about ranks, layout, parameters and batches."""
        config = self.config
        world = self.world
        layout = config.layout
        how = ", ".join(filter(None, (config.parallel.schedule, layout.sharding)))
        trained = ""
        if config.adapt.adapts:
            count = trained_count(config.model, vocab_size)
            trained = f"of which {short(count)} train, "
        return (
            f"{counted(world.size, 'rank')} on {counted(world.nodes, 'node')}, "
            f"{layout}, {how}, {config.precision.compute}; "
            f"{short(parameter_count(config.model, vocab_size))} parameters, {trained}"
            f"vocabulary {vocab_size}; "
            f"{counted(config.run.steps, 'step')} of {config.batch.global_size} x "
            f"{config.model.seq_length} tokens"
        )

    def _nothing_left(self) -> str:
        """Return the log line for a run that has no steps left. It names the configuration key that
        must be changed to train further.
        """
        reason = f"run.steps = {self.config.run.steps}"
        legal = f"run.steps above {self.first}"
        if self.over:
            reason = self.over
            legal = "a higher run.stop_after_worse, or 0"
        return (
            f"step {self.first} was trained before; {reason}: nothing is left to do, and "
            f"nothing is written{self._changed()}; legal: {legal}"
        )

    def _beginning(self) -> Iterator[str]:
        """Yield the log lines about the state from which the run begins."""
        if self.how != "begins":
            yield self.how + self._changed()
            if self.config.checkpoint.initial and self.how.startswith("resumed"):
                yield "checkpoint.initial is not used: the run continues from its own state"
        answer = self.course.answer
        if answer.note:
            yield answer.note
        if answer.trained_on.last.step == self.first > 0:
            sample = self.course.samples(self.first)
            yield (
                f'data.change = "{FROM_HERE}": the samples have another order '
                f"from step {self.first + 1} (sample {sample}) on"
            )

    def _changed(self) -> str:
        """Return the last part of a log line: the settings that differ from the previous
        attempt."""
        changes = "; ".join(self.course.answer.changed)
        return f"; changed since: {changes}" if changes else ""
