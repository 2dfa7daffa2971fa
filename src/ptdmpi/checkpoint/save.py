"""Saving of checkpoints. A checkpoint consists of logical (unsharded) tensors, which a run with any
layout can read.

A checkpoint is a directory `step-00000100/` with `manifest.json` and one safetensors file from each
rank. The manifest lists every logical tensor (`weights/NAME`, `exp_avg/NAME`, `exp_avg_sq/NAME`;
the weights are the fp32 master weights) with its shape, its type, and the file and offset of each
of its slices. All files are written into a directory with a temporary name, and synced to the disk.
After that, the manifest is written, the directory is renamed, and the file `latest` is changed, in
this order. If several ranks have the same tensors, each of them writes an equal part of the bytes.

A thread of each rank writes the rank's file, and a thread of rank 0 writes the manifest and renames
the directory. When ranks must agree, for example that all files are written, the main threads of
the ranks use the world communicator between two training steps. The threads that write files never
call MPI. MPI therefore need not support threads, and the messages of a save cannot be confused with
the messages of a training step.
"""

import contextlib
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from ptdmpi.checkpoint import best
from ptdmpi.checkpoint import directory as files
from ptdmpi.checkpoint.boxes import Outgoing, write
from ptdmpi.checkpoint.load import on_root
from ptdmpi.checkpoint.manifest import (
    EXPONENTS,
    EXTRAS,
    Progress,
    Written,
    exponents_as_json,
    manifest_text,
    write_manifest,
)
from ptdmpi.checkpoint.memory import MemoryCopies
from ptdmpi.checkpoint.outgoing import OutgoingState
from ptdmpi.checkpoint.resume import Resumption
from ptdmpi.checkpoint.retention import Retention
from ptdmpi.comm.queues import Passed, belong_to
from ptdmpi.comm.world import Axes
from ptdmpi.config import InputError, SharedInputError
from ptdmpi.lineage.course import Course
from ptdmpi.model.state import State

T = TypeVar("T")


class SaveFailed(SharedInputError):
    """An error: a checkpoint could not be written. Every rank raises `SaveFailed`. Earlier
    checkpoints stay on the disk."""


@dataclass(frozen=True)
class Saved:
    """A checkpoint that is complete on the disk. `stall_s` is the number of seconds for which
    training waited for the save. `write_s` is the number of seconds from the first written byte
    until the file `latest` named the checkpoint. `warning` says that `latest` could not be
    written, or that older checkpoints could not be removed; it is None otherwise."""

    path: Path
    step: int
    bytes: int
    stall_s: float
    write_s: float
    warning: str | None = None


@dataclass
class _Flight:
    """A save that is in progress: first all ranks write their files, then rank 0 publishes the
    checkpoint."""

    temporary: Path
    progress: Progress
    validation_loss: float | None
    said: dict[str, Any]
    since: float
    writing: Future[Written]
    # on rank 0, the result of publishing the checkpoint; None on other ranks
    publishing: Future[tuple[float, str | None]] | None = None
    written: bool = False
    bytes: int = 0
    stall_s: float = 0.0


class Checkpoints:
    """The checkpoints of one run directory. All ranks call each method together, except `close` and
    `describe`.

    The class itself writes checkpoints. Its attribute `retention` keeps and removes checkpoints,
    and `resumption` finds and checks the checkpoint from which a run resumes. `validated` has the
    step and the loss of the last validation; the training loop sets this attribute.
    """

    def __init__(self, directory: Path, state: State, axes: Axes, course: Course) -> None:
        """Prepare to save the training state `state` in `directory`. `course` describes the run.
        Its configuration has the settings of checkpoints, in the section [checkpoint]."""
        self.directory = directory
        self.state = state
        self.course = course
        self.config = course.config.checkpoint
        self.world = axes.world
        self.validated: tuple[int, float] | None = None
        # a function that returns further entries for the manifest, as JSON; a user's program may
        # replace this function
        self.extras: Callable[[], dict[str, Any]] = dict
        self.retention = Retention(directory, self.config)
        self.resumption = Resumption(self.world, state, course, self.retention)
        mean = course.config.data_parallel.checkpoint == "average"
        self.outgoing = OutgoingState(state, axes, mean=mean, copied=self.config.asynchronous)
        self._flight: _Flight | None = None
        # there is only one thread, so that rank 0 publishes a checkpoint after its own file is
        # written
        self._threads = ThreadPoolExecutor(
            1, "checkpoint", initializer=belong_to, initargs=(state.buffer.device,)
        )

    @property
    def state_bytes(self) -> int:
        """Return the size in bytes of the tensors of a checkpoint, summed over all ranks."""
        return self.outgoing.total_bytes

    @property
    def branches(self) -> bool:
        """Return True if the run has not resumed from its own newest checkpoint, so that the next
        save renames checkpoints."""
        return self.retention.branches

    @property
    def followed(self) -> Path | None:
        """Return the checkpoint that `checkpoint.resume` names, if this start has resumed from a
        later checkpoint of the run instead; otherwise None. See `Resumption`."""
        return self.resumption.followed

    @property
    def mean_of(self) -> int:
        """Return the number of replicas if the run continues from their mean, otherwise 0; see
        `Resumption`."""
        return self.resumption.mean_of

    def resume(self, wanted: str, lost: bool = False) -> tuple[Progress | None, list[str]]:
        """Load the checkpoint that `checkpoint.resume = wanted` names; see `Resumption.resume`."""
        return self.resumption.resume(wanted, lost)

    def begin_from(
        self, path: Path, tokenizer_sha256: str | None, fresh: Collection[str] = ()
    ) -> tuple[Path, list[str]]:
        """Load only the weights that `path` names; see `Resumption.begin_from`."""
        return self.resumption.begin_from(path, tokenizer_sha256, fresh)

    def resume_from_copy(self, copies: MemoryCopies, wanted: str) -> Progress | None:
        """Load a copy from the nodes' memory; see `Resumption.resume_from_copy`."""
        return self.resumption.resume_from_copy(copies, wanted)

    def describe(self, step: int, written: Sequence[Written]) -> str:
        """Return the text of the manifest of a copy of the present state, which is the state after
        `step`. Only rank 0 calls this method."""
        return manifest_text(
            self._progress(step),
            self.course.config.model.model_dump(),
            written=written,
            lineage=self._lineage(None, self._said()),
        )

    def save(self, step: int) -> list[Saved]:
        """Write a checkpoint of the state after `step` steps. Return the saves that are complete.

        If an earlier save is still in progress, this method first completes the earlier save, and
        also returns it. If `checkpoint.asynchronous` is True, the state is copied, a thread writes
        the copy, and later calls of `poll` complete the save. Raise SaveFailed if a rank could not
        write; the files of the failed save are then removed.
        """
        done = self.finish()
        begin = time.perf_counter()
        try:
            temporary = on_root(self.world, lambda: self.retention.prepare(step, self.state_bytes))
        except SharedInputError as error:
            raise self._failure(step, str(error)) from None
        parts = self.outgoing.take()
        path = temporary / f"rank-{self.world.rank:05d}.safetensors"
        since = time.perf_counter()
        writing = self._threads.submit(_write, self.state.read, path, parts)
        loss = None
        if self.validated is not None and self.validated[0] == step:
            loss = self.validated[1]
        self._flight = _Flight(
            temporary=temporary,
            progress=self._progress(step),
            validation_loss=loss,
            said=self._said(),
            since=since,
            writing=writing,
        )
        self._flight.stall_s = time.perf_counter() - begin
        if self.config.asynchronous:
            return done
        return [*done, *self.finish()]

    def poll(self) -> list[Saved]:
        """Advance a save that is in progress, without waiting for the disk. Return the save when it
        is complete; otherwise return an empty list.

        The training loop calls this method between steps. Raise SaveFailed if a rank could not
        write.
        """
        return self._advance(wait=False)

    def finish(self) -> list[Saved]:
        """Wait until the save in progress is complete, and return it as a list with one entry.
        Return an empty list if no save is in progress. Raise SaveFailed if a rank could not
        write."""
        return self._advance(wait=True)

    def close(self) -> None:
        """Wait until this rank's thread has ended, without waiting for other ranks. An incomplete
        save stays on the disk, and the next save removes it."""
        self._threads.shutdown(wait=True)
        self._flight = None

    def check_space(self) -> None:
        """Raise InputError, on every rank, if the file system has not enough space for one
        checkpoint."""
        on_root(self.world, lambda: files.require_space(self.directory, self.state_bytes))

    def _progress(self, step: int) -> Progress:
        counters = self.state.counters
        return Progress(
            step=step,
            samples=self.course.samples(step),
            updates=counters.updates,
            loss_scale=counters.loss_scale,
            good_steps=counters.good_steps,
            seed=self.course.config.run.seed,
        )

    def _said(self) -> dict[str, Any]:
        """Return the entries of a manifest about the present state: the exponents of delayed
        scales, and the entries of a user's program."""
        said = {
            EXPONENTS: exponents_as_json(self.state.counters.exponents),
            EXTRAS: self.extras(),
        }
        return {key: entries for key, entries in said.items() if entries}

    def _lineage(self, loss: float | None, said: dict[str, Any]) -> dict[str, Any]:
        """Return the entries of a manifest about the origin of its tensors. `loss` is the
        validation loss of this state. `said` has the entries that `_said` returned for this
        state."""
        return {**self.course.in_manifest(), **best.in_manifest(loss), **said}

    def _advance(self, wait: bool) -> list[Saved]:
        flight = self._flight
        if flight is None:
            return []
        begin = time.perf_counter()
        done = None
        if self._written(flight, wait):
            done = self._published(flight, wait)
        flight.stall_s += time.perf_counter() - begin
        if done is None:
            return []
        self._flight = None
        path = flight.temporary.with_suffix("")
        return [Saved(path, flight.progress.step, flight.bytes, flight.stall_s, *done)]

    def _written(self, flight: _Flight, wait: bool) -> bool:
        """Return True if all ranks have written their files; if `wait` is True, wait for the files.
        The first call that returns True makes the thread of rank 0 begin to publish the
        checkpoint."""
        if flight.written:
            return True
        if not all(self.world.all_gather_object(wait or flight.writing.done())):
            return False
        # all ranks must raise an error together: if a single rank raised it, all other ranks would
        # wait for this rank in the next collective
        part, error = _result(flight.writing)
        text = None
        if error is not None:
            text = f"rank {self.world.rank}: {error}"
        everyone = self.world.all_gather_object((part, text))
        self._give_up_on(flight, next((text for _, text in everyone if text), None))
        written = [part for part, _ in everyone]
        flight.written = True
        flight.bytes = sum(part.bytes for part in written)
        if self.world.rank == 0:
            flight.publishing = self._threads.submit(self._publish, flight, written)
        return True

    def _publish(self, flight: _Flight, written: list[Written]) -> tuple[float, str | None]:
        """Write the manifest, give the checkpoint its name, and remove older checkpoints. Only rank
        0 calls this method. Return two values: the seconds since the first byte was written, and a
        warning, or None if there is nothing to warn of."""
        model = self.course.config.model.model_dump()
        lineage = self._lineage(flight.validation_loss, flight.said)
        write_manifest(flight.temporary, flight.progress, model, written=written, lineage=lineage)
        warnings = [self.retention.publish(flight.temporary)]
        write_s = time.perf_counter() - flight.since
        warnings.append(self.retention.remove_old())
        return write_s, "; ".join(filter(None, warnings)) or None

    def _published(self, flight: _Flight, wait: bool) -> tuple[float, str | None] | None:
        done: tuple[float, str | None] | None = None
        error: str | None = None
        if flight.publishing is not None and (wait or flight.publishing.done()):
            done, error = _result(flight.publishing)
        # Rank 0 sends its result in every poll. Only rank 0 knows when the save is complete, and
        # all ranks must stop polling after the same step.
        done, error = self.world.broadcast_object((done, error))
        self._give_up_on(flight, error)
        return done

    def _give_up_on(self, flight: _Flight, error: str | None) -> None:
        if error is None:
            return
        self._flight = None
        # the next save removes files that cannot be removed now; only the first error is reported
        with contextlib.suppress(SharedInputError):
            on_root(self.world, lambda: files.remove_leftovers(self.directory))
        raise self._failure(flight.progress.step, error)

    def _failure(self, step: int, error: str) -> SaveFailed:
        path = self.directory / files.name_of(step)
        return SaveFailed(f"checkpoint {path} was not written: {error}")


def _write(read: Passed, path: Path, parts: Sequence[Outgoing]) -> Written:
    """Write a rank's file, after waiting until its slices have been copied to the host (`read`)."""
    read.host_waits()
    return write(path, parts)


def _result(future: Future[T]) -> tuple[T, None] | tuple[None, str]:
    """Wait until `future` is done. Return (result, None), or (None, message) after an OSError or an
    InputError."""
    try:
        return future.result(), None
    except (OSError, InputError) as error:
        return None, str(error)
