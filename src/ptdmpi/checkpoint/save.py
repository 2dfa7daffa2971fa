"""Checkpoints of logical tensors: any layout reads what any layout wrote.

A checkpoint is a directory `step-00000100/` with one safetensors file per rank that had something
to write, and `manifest.json`, which says for every logical tensor (`weights/NAME`, `exp_avg/NAME`,
`exp_avg_sq/NAME`; float32 masters) its shape, its type, and in which file which box of it stands.
Everything is written and synced under a temporary name; the manifest comes last, then the directory
is renamed, then `latest` is moved. Ranks that hold equal tensors share the writing by bytes.

A thread of each rank writes its file, and one of rank 0 the rest. What all ranks must agree on goes
over the world communicator, on the main thread, between two steps: MPI need not bear threads, and
the messages of a step meet no others.
"""

import contextlib
import itertools
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from torch import Tensor

from ptdmpi.checkpoint import best
from ptdmpi.checkpoint import directory as files
from ptdmpi.checkpoint.boxes import Array, Outgoing, write
from ptdmpi.checkpoint.examine import checkpoints, newest
from ptdmpi.checkpoint.load import drawn, load, load_tensors, on_root, took_mean
from ptdmpi.checkpoint.manifest import Manifest, Progress, Written, write_manifest
from ptdmpi.checkpoint.share import share
from ptdmpi.comm.queues import Passed, belong_to, copies_of, on_its_way
from ptdmpi.comm.world import Axes
from ptdmpi.config import InputError, SharedInputError
from ptdmpi.lineage.course import Course
from ptdmpi.model.state import State
from ptdmpi.plan.shape import parameters

T = TypeVar("T")


class SaveFailed(SharedInputError):
    """A checkpoint could not be written; every rank knows, and those before it stay."""


@dataclass(frozen=True)
class Saved:
    """A checkpoint that is complete on the disk. `stall_s`: how long the training waited for it,
    `write_s`: from the first byte to the moved `latest`. `warning`: why older ones did not go."""

    path: Path
    step: int
    bytes: int
    stall_s: float
    write_s: float
    warning: str | None = None


@dataclass
class _Flight:
    """A save under way: all ranks write their files, then rank 0 publishes."""

    temporary: Path
    progress: Progress
    validation_loss: float | None
    since: float
    writing: Future[Written]
    publishing: Future[tuple[float, str | None]] | None = None  # rank 0 only
    written: bool = False
    bytes: int = 0
    stall_s: float = 0.0


class Checkpoints:
    """The checkpoints of one run directory; every rank calls every method but `close`."""

    def __init__(self, directory: Path, state: State, axes: Axes, course: Course) -> None:
        """`course`: of the run whose state it is, and whose section [checkpoint] counts."""
        self.directory, self.state, self.course = directory, state, course
        self.config = course.config.checkpoint
        self.world = axes.world
        self.damaged: list[str] = []  # names of checkpoints that were stepped over
        self.validated: tuple[int, float] | None = None  # the last validation: step, loss
        # what the first save has to do with checkpoints that the run does not come from
        self._branch: Callable[[], None] | None = None
        self.followed: Path | None = None  # by an earlier start, which this one goes on from
        self.mean_of = (
            0  # so many replicas, which a checkpoint had each for itself, the run goes on
        )
        # once: boxes and owners do not change, and each save reads the same views
        self.mean = course.config.data_parallel.checkpoint == "average"
        self.parts = list(share(state, axes, self.mean))
        mine = sum(part.values.nbytes for part in self.parts)
        self.state_bytes = sum(self.world.all_gather_object(mine))
        self._copies = copies_of(state.buffer.device)
        self._host: Tensor | None = None
        self._flight: _Flight | None = None
        # one: on rank 0 publishing stands behind the writing of its own file
        self._threads = ThreadPoolExecutor(
            1, "checkpoint", initializer=belong_to, initargs=(state.buffer.device,)
        )

    # -- saving ----------------------------------------------------------------------------------

    def save(self, step: int) -> list[Saved]:
        """Write the state after `step` steps; returns what is complete.

        With `checkpoint.asynchronous` the state is copied and the rest left to a thread: an earlier
        save that was still under way is waited for and returned, and `poll` brings on this one.
        Raises SaveFailed where a rank could not write; what it had written is removed.
        """
        done = self.finish()
        begin = time.perf_counter()
        try:
            temporary = on_root(self.world, lambda: self._prepare(step))
        except SharedInputError as error:
            raise self._failure(step, str(error)) from None
        parts = self._outgoing()
        path = temporary / f"rank-{self.world.rank:05d}.safetensors"
        since = time.perf_counter()
        writing = self._threads.submit(_write, self.state.read, path, parts)
        loss = self.validated[1] if self.validated and self.validated[0] == step else None
        self._flight = _Flight(temporary, self._progress(step), loss, since, writing)
        self._flight.stall_s = time.perf_counter() - begin
        return done if self.config.asynchronous else [*done, *self.finish()]

    def _prepare(self, step: int) -> Path:
        """Rank 0: where to write. Only now others are set aside: a start that saves nothing leaves
        a run as it was."""
        temporary = files.prepare(self.directory, step, self.state_bytes)
        if self._branch is not None:
            self._branch()
            self._branch = None
            if (self.directory / files.BEST).is_file():  # it may name one of those
                best.point(self.directory, self.damaged)
        return temporary

    def poll(self) -> list[Saved]:
        """Bring on a save under way without waiting for the disk; returns it when it is complete.

        To be called between steps. Raises SaveFailed.
        """
        return self._advance(wait=False)

    def finish(self) -> list[Saved]:
        """Wait for a save under way and return it. Raises SaveFailed."""
        return self._advance(wait=True)

    def close(self) -> None:
        """Wait for this rank's thread, and no other rank. A save under way stays a leftover, which
        the next save removes."""
        self._threads.shutdown(wait=True)
        self._flight = None

    def check_space(self) -> None:
        """Raises InputError, on every rank, where not even one checkpoint could be written."""
        on_root(self.world, lambda: files.require_space(self.directory, self.state_bytes))

    def _progress(self, step: int) -> Progress:
        return Progress(
            step=step,
            samples=self.course.samples(step),
            seed=self.course.config.run.seed,
            **asdict(self.state.counters),
        )

    def _outgoing(self) -> list[Outgoing]:
        """This rank's part of the state: under `asynchronous` as it is now, and of replicas that
        differ their mean where that is saved, in the host copy, whose memory is used again by each
        save; else the state itself. A device copies beside what it computes, and the next update
        waits for that (`State.read`)."""
        self.state.settle()  # the views are older than what is on its way into them
        views = [part.values for part in self.parts]
        if self.config.asynchronous or self.mean:
            views = self._copied()
        found = []
        for part, view in zip(self.parts, views, strict=True):
            dtype = str(view.dtype).removeprefix("torch.")
            values = partial(self._on_host, view)
            found.append(Outgoing(part.key, part.shape, part.box, dtype, values))
        return found

    def _copied(self) -> list[Tensor]:
        """The parts in the host copy."""
        ends = list(itertools.accumulate(part.values.numel() for part in self.parts))
        if self._host is None:  # room for this rank's whole part, made at the first save
            size, dtype = (ends or [0])[-1], self.state.buffer.precision.master
            self._host = self._copies.locked(size * dtype.itemsize).view(dtype)
        host = [
            self._host[end - part.values.numel() : end].view(part.values.shape)
            for part, end in zip(self.parts, ends, strict=True)
        ]
        for kind in self.state.kinds:
            with self.state.averaged(kind) if self.mean else contextlib.nullcontext():
                with self._copies.behind(self._copies.computed()):
                    for part, room in zip(self.parts, host, strict=True):
                        if part.kind == kind:
                            room.copy_(part.values, non_blocking=True)
                            self.state.let_go()
                self.state.read = self._copies.passed()
        return host

    def _on_host(self, values: Tensor) -> Array:
        """Asked for one by one, as each is written: those before need no memory any more. A device
        copies them into memory that cannot be paged out, as it does what is copied beside it."""
        self.state.let_go()
        if values.device.type == "cpu":  # it waits for nothing, least for what is computed now
            return values.numpy()
        with self._copies.behind(self._copies.computed()):
            host = on_its_way(values)
        self._copies.passed().host_waits()
        return host.numpy()

    def _advance(self, wait: bool) -> list[Saved]:
        flight = self._flight
        if flight is None:
            return []
        begin = time.perf_counter()
        done = self._published(flight, wait) if self._written(flight, wait) else None
        flight.stall_s += time.perf_counter() - begin
        if done is None:
            return []
        self._flight = None
        path = flight.temporary.with_suffix("")
        return [Saved(path, flight.progress.step, flight.bytes, flight.stall_s, *done)]

    def _written(self, flight: _Flight, wait: bool) -> bool:
        """Whether all ranks have written; when they have, rank 0's thread begins to publish."""
        if flight.written:
            return True
        if not all(self.world.all_gather_object(wait or flight.writing.done())):
            return False
        # no rank may raise alone: the others would wait for it in the next collective
        part, error = _result(flight.writing)
        text = f"rank {self.world.rank}: {error}" if error else None
        everyone = self.world.all_gather_object((part, text))
        self._give_up_on(flight, next((text for _, text in everyone if text), None))
        written = [part for part, _ in everyone]
        flight.written, flight.bytes = True, sum(part.bytes for part in written)
        if self.world.rank == 0:
            flight.publishing = self._threads.submit(self._publish, flight, written)
        return True

    def _publish(self, flight: _Flight, written: list[Written]) -> tuple[float, str | None]:
        """What rank 0 does alone: (seconds since the save began, why older ones did not go)."""
        model = self.course.config.model.model_dump()
        lineage = {**self.course.in_manifest(), **best.in_manifest(flight.validation_loss)}
        write_manifest(flight.temporary, flight.progress, model, written, lineage)
        files.publish(flight.temporary, self.damaged)
        keep_best = int(self.config.keep_best)
        if keep_best:
            best.point(self.directory, self.damaged)
        write_s = time.perf_counter() - flight.since
        keep, keep_every = self.config.keep, self.config.keep_every
        try:
            spared = best.spared(self.directory, keep_best, self.damaged) if keep else ()
            retention = (self.directory, keep, keep_every, self.damaged, spared)
            for path in list(files.superfluous(*retention)):
                files.discard(path)
        except OSError as error:
            return write_s, f"older checkpoints cannot be removed: {error}"
        return write_s, None

    def _published(self, flight: _Flight, wait: bool) -> tuple[float, str | None] | None:
        done: tuple[float, str | None] | None = None
        error: str | None = None
        if flight.publishing is not None and (wait or flight.publishing.done()):
            done, error = _result(flight.publishing)
        # in every poll: only rank 0 knows, and all must stop asking after the same step
        done, error = self.world.broadcast_object((done, error))
        self._give_up_on(flight, error)
        return done

    def _give_up_on(self, flight: _Flight, error: str | None) -> None:
        if error is None:
            return
        self._flight = None
        # what cannot be removed now, the next save removes; the first error is the one to tell
        with contextlib.suppress(SharedInputError):
            on_root(self.world, lambda: files.remove_leftovers(self.directory))
        raise self._failure(flight.progress.step, error)

    def _failure(self, step: int, error: str) -> SaveFailed:
        path = self.directory / files.name_of(step)
        return SaveFailed(f"checkpoint {path} was not written: {error}")

    # -- loading ---------------------------------------------------------------------------------

    def resume(self, wanted: str, lost: bool = False) -> tuple[Progress | None, list[str]]:
        """Load what `checkpoint.resume` asks for: "auto" the newest complete one if there is one,
        "never" nothing, else the checkpoint of that path, of a run directory the newest one there,
        or, where an earlier start has gone on from that path, the run's own newest. Returns also
        what was stepped over. `lost`: replicas were, so that those that are left may begin from the
        mean of all.

        Raises InputError if a named checkpoint cannot be used, if one is of another model or was
        trained on something else (`Course.judge`), or if all are damaged: to begin
        anew would bury what can perhaps be mended.
        """
        if wanted == "never":
            self._branch = partial(files.branch, self.directory, None)
            return None, []
        if on_root(self.world, lambda: self._is_own(wanted)):
            wanted = "auto"
        elif wanted != "auto" and on_root(self.world, lambda: self._went_on_from(wanted)):
            self.followed, wanted = Path(wanted), "auto"
        skipped: list[str] = []

        def judge(where: Path, manifest: Manifest) -> None:
            self.course.judge("resume", where, manifest.said)

        for candidate in on_root(self.world, lambda: self._candidates(wanted)):
            loaded = load(self.state, self.world, candidate, judge, self.mean or lost)
            if isinstance(loaded, Manifest):
                if took_mean(self.state, loaded):
                    self.mean_of = loaded.replicas
                if wanted != "auto":
                    named = Path(wanted)
                    self._branch = partial(files.branch, self.directory, candidate, named)
                return loaded.progress, skipped
            skipped.append(f"{candidate}: {loaded}")
            self.damaged += [candidate.name] if wanted == "auto" else []
        if wanted != "auto":
            raise SharedInputError(f"checkpoint.resume = {'; '.join(skipped)}")
        if skipped:
            raise SharedInputError(
                f"no checkpoint in {self.directory} is complete ({'; '.join(skipped)}); "
                'checkpoint.resume = "never" begins anew'
            )
        return None, []

    @property
    def branches(self) -> bool:
        """Whether the run has not gone on from its own newest checkpoint."""
        return self._branch is not None

    def _is_own(self, wanted: str) -> bool:
        """Whether `wanted` is the run's own directory or its `checkpoints/`, where "auto" means the
        newest."""
        here = self.directory.resolve()
        return wanted != "auto" and Path(wanted).resolve() in (here, here.parent)

    def _went_on_from(self, wanted: str) -> bool:
        """The command of a batch job stays the same when it is started again: then it goes on."""
        return files.went_on_from(self.directory, files.named(Path(wanted)))

    def begin_from(
        self, path: Path, tokenizer_sha256: str | None, fresh: Collection[str] = ()
    ) -> tuple[Path, list[str]]:
        """Load the weights of the newest complete checkpoint that `path` names, and nothing else of
        it; returns which that is, and what of a head for a task stays as it was drawn: of adapters
        that is among `fresh`, for the base may have the rest. Raises InputError on every rank.
        `tokenizer_sha256`: of the tokenizer that they know, where its checkpoint does not say so.
        """
        directory = on_root(self.world, lambda: newest(path))

        def judge(where: Path, manifest: Manifest) -> None:
            self.course.judge("initial", where, manifest.said)
            if self.course.answer.note:
                self.course.require_tokenizer(path, tokenizer_sha256)

        model = self.course.config.model
        head = parameters.task_head(model)
        loaded = load_tensors(self.state, self.world, directory, judge=judge, head=head)
        if isinstance(loaded, str):
            raise SharedInputError(f"checkpoint.initial = {directory}: {loaded}")
        adapts = model.adapt.adapts
        return directory, [one for one in drawn(loaded, head) if one in fresh or not adapts]

    def _candidates(self, wanted: str) -> list[Path]:
        if wanted != "auto":
            try:
                return checkpoints(Path(wanted))[::-1]
            except InputError as error:
                raise InputError(f"checkpoint.resume = {wanted}: {error}") from None
        if self.directory.is_dir():
            files.put_back(self.directory)
        return files.checkpoints_in(self.directory)[::-1]


def _write(read: Passed, path: Path, parts: Sequence[Outgoing]) -> Written:
    """A rank's file, once what it is made of has been copied to the host."""
    read.host_waits()
    return write(path, parts)


def _result(future: Future[T]) -> tuple[T, None] | tuple[None, str]:
    """Wait for it: (result, None), or (None, why the disk or its user must be asked)."""
    try:
        return future.result(), None
    except (OSError, InputError) as error:
        return None, str(error)
