"""The run directory: `config.toml`, `metrics.jsonl`, `log.txt` and `done`, written by rank 0."""

import errno
import json
import os
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from ptdmpi.base.disk import open_file, read_file, write_whole
from ptdmpi.base.launched import is_supervised
from ptdmpi.base.words import counted
from ptdmpi.checkpoint.directory import of_run
from ptdmpi.config import Config, InputError
from ptdmpi.lineage.attempts import HISTORY
from ptdmpi.sinks.contract import Past
from ptdmpi.sinks.notices import Notices
from ptdmpi.sinks.sinks import Sinks

DONE = "done"  # name of the file that marks a complete run.
FAILED_S = 3.0  # time limit for the delivery of the message that the run has failed.
DAMAGED = "metrics.damaged.jsonl"  # copy of the records before damaged lines were removed


def _show(line: str) -> None:
    print(line, flush=True)


class RunDirectory:
    """The object that writes `metrics.jsonl` and `log.txt` in a run directory. Only rank 0 has such
    an object.

    Each record is one line of `metrics.jsonl`, written by one system call. When a run resumes at a
    step, the records and timelines of later steps, an incomplete last line and the file `done` are
    removed. If the disk fails during the run, the run continues, because its state is in memory.
    The run then prints one warning, and writes the missing lines as soon as the disk works again.
    """

    def __init__(
        self,
        path: Path,
        config_text: str,
        resumed_step: int,
        show: Callable[[str], None] = _show,
        *,
        handed_over: Mapping[str, str] | None = None,
    ) -> None:
        """Open the directory `path` for an attempt that resumes after step `resumed_step` (0: a new
        run). `show` is a function that prints a line.

        `handed_over` is None unless the attempt continues from live state, which is the training
        state in the memory of ranks that survived a loss. It maps the name of a file to the lines
        that could not be written before the loss (see `unwritten`). If the directory cannot be
        written to, a run with live state prints a warning and continues; any other run raises
        InputError.
        """
        self.path = path
        self.metrics = path / "metrics.jsonl"
        self.log = path / "log.txt"
        self.show = show
        self._resumed_step = resumed_step
        self._waiting = {path / name: text for name, text in (handed_over or {}).items()}
        # records after the resumed step are dropped, because these steps are trained again
        if records := self._waiting.pop(self.metrics, ""):
            kept = [line for line in records.splitlines(True) if self._is_kept(line.encode())]
            if kept:
                self._waiting[self.metrics] = "".join(kept)
        self._sinks: Sinks | None = None
        self._messages: Notices | None = None
        self._over = False
        self._loss: float | None = None
        self._step = resumed_step
        self._dropped = False
        self._begun: set[Path] = set()  # files to which this attempt has appended lines
        self._gone: set[Path] = set()  # files that were deleted during this attempt
        preparing: list[Callable[[], None]] = [
            partial(self._write_config, config_text),
            self._drop_later,
        ]
        if handed_over is None:
            preparing.insert(0, self._try_files)
        for prepare in preparing:
            try:
                prepare()
            except OSError as error:
                if handed_over is None:
                    raise InputError(f"run.dir = {path}: {error}") from None
                show(
                    f"warning: run.dir = {path}: {error}; the run continues with its state in "
                    "memory"
                )

    def _write_config(self, text: str) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        write_whole(self.path / "config.toml", text)

    def _try_files(self) -> None:
        """Open the files to which the run appends. Raises OSError if a file exists and cannot be
        written, for example because it is a link to itself. Raises InputError if the run cannot
        save checkpoints."""
        of_run(self.path / "checkpoints")
        for path in (self.metrics, self.log, self.path / HISTORY):
            if os.path.lexists(path):
                open_file(path, "ab").close()

    def _drop_later(self) -> None:
        """Remove the file `done`, and all records and timelines of steps after the resumed step."""
        (self.path / DONE).unlink(missing_ok=True)
        if self.metrics.exists():
            self._dropped = self._drop_records()
        self._drop_timelines()

    def _is_kept(self, line: bytes) -> bool:
        """Return True if `line` is the record of a step up to the resumed step."""
        step = _step(line)
        return step is not None and step <= self._resumed_step

    @property
    def unwritten(self) -> dict[str, str]:
        """Return a dict: file name -> lines that are not written yet, because the disk has
        failed."""
        return {path.name: text for path, text in self._waiting.items()}

    def _drop_records(self) -> bool:
        """Remove the records after the resumed step, and damaged lines. Return True if a line was
        removed. If a line before the last one is damaged, also store a copy of the old file under
        the name DAMAGED, and print a warning."""
        content = read_file(self.metrics)
        lines = content.splitlines()
        steps = [_step(line) for line in lines]
        if damaged := steps[:-1].count(None):
            write_whole(self.path / DAMAGED, content)
            left_out = (
                f"{counted(damaged, 'damaged line')} {'is' if damaged == 1 else 'are'} left out"
            )
            self.say(f"warning: {self.metrics}: {left_out}; {DAMAGED} has the file as it was")
        kept = [line + b"\n" for line in lines if self._is_kept(line)]
        if b"".join(kept) != content:
            write_whole(self.metrics, b"".join(kept))
        return len(kept) < len(lines)

    def _drop_timelines(self) -> None:
        for timeline in (self.path / "timeline").glob("step-*.json"):
            number = timeline.stem.removeprefix("step-")
            if number.isdecimal() and int(number) > self._resumed_step:
                timeline.unlink()

    def open_sinks(self, config: Config) -> None:
        """From now on, also send all records to the tools that the section [log] names, such as
        TensorBoard."""
        past = Past(self.path, self._resumed_step, self._dropped)
        self._sinks = Sinks(config, past, self.say)
        if not is_supervised():  # `ptdmpi run` sends the messages itself
            self._messages = Notices(config.log, config.run, self.say)

    def tell(self, event: str, why: str) -> None:
        """Send a message about an event of the run, with the last step and its loss, to the
        receivers that `log.notify` names. `event` is the name of the event, and `why` is its
        reason. Under `ptdmpi run` nothing is sent, because `ptdmpi run` sends the messages itself.
        After the message about the end of the run, no more messages are sent."""
        if self._messages is not None and not self._over:
            self._over = event != "begins"
            self._messages.send(event, self._step, self._loss, why)

    def failed(self, why: str) -> None:
        """Send the message that the run has failed, and wait up to FAILED_S seconds for its
        delivery, because the process is ended afterwards."""
        self.tell("failed", why.removeprefix("failed: "))
        if self._messages is not None:
            self._messages.close(FAILED_S)

    def record(self, **values: Any) -> None:
        """Append one record to `metrics.jsonl`, and send the record to the sinks (other tools, such
        as TensorBoard)."""
        self._append(self.metrics, json.dumps(values))
        if "loss" in values:
            self._step, self._loss = values["step"], values["loss"]
        if self._sinks is not None:
            self._sinks.record(values)

    def close(self) -> None:
        """Close the sinks (the tools that receive the records), and deliver all messages. Later
        records are written only to `metrics.jsonl`."""
        if self._sinks is not None:
            self._sinks.close()
        if self._messages is not None:
            self._messages.close()

    def warn_of_lost_lines(self) -> None:
        """Print a warning for each file that still lacks lines, because the attempt ends and nobody
        will write them."""
        for path, lines in self._waiting.items():
            missing = counted(len(lines.splitlines()), "line")
            text = f"ptdmpi: warning: {path} lacks the last {missing}, which could not be written"
            print(text, file=sys.stderr, flush=True)

    def say(self, line: str, shown: bool = True) -> None:
        """Append a line to `log.txt`. If `shown` is True, also print it."""
        if shown:
            self.show(line)
        self._append(self.log, line)

    def _append(self, path: Path, line: str) -> None:
        gone = path in self._begun and self.path.exists() and not path.exists()
        if gone and path not in self._gone:
            self._gone.add(path)
            self.say(
                f"warning: {path} was deleted or moved during the run: its earlier lines are lost, "
                "and later lines are written to a new file"
            )
        waiting = self._waiting.pop(path, "")
        try:
            append_lines(path, waiting + line + "\n")
        except OSError as error:
            if not waiting:
                text = f"ptdmpi: warning: {path}: {error.strerror}; its lines wait"
                print(text, file=sys.stderr, flush=True)
            self._waiting[path] = waiting + line + "\n"
        else:
            self._begun.add(path)


def mark_done(path: Path, steps: int) -> None:
    """Write the file `done` to the run directory `path`. This file means that the run is complete
    after `steps` steps.

    `done` is the last file that a run writes. Only this file proves that the run is complete,
    because a launcher can exit with code 0 although it has lost a node. If the file already has the
    same content, it is not written again. Raises InputError if the file cannot be written.
    """
    done = path / DONE
    text = json.dumps({"steps": steps}) + "\n"
    try:
        if not done.is_file() or done.read_bytes() != text.encode():
            write_whole(done, text)
    except OSError as error:
        raise InputError(
            f"{done} cannot be written: {error.strerror}; all steps are trained and saved: the "
            "same command ends the run when there is space"
        ) from None


def append_lines(path: Path, lines: str) -> None:
    """Append whole lines to a file in one unbuffered write, or append nothing.

    Raises OSError if the disk has no space for all lines, or if the file would become too large.
    """
    data = lines.encode()
    with open_file(path, "ab") as file:
        size = file.tell()
        written = file.write(data)
        if written == len(data):
            return
        try:
            if written + file.write(data[written:]) < len(data):  # raises the error of the disk
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            file.truncate(size)
            raise


def _step(line: bytes) -> int | None:
    """Return the step of the record in `line`, or None if `line` contains no record."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None
