"""The sides of a row of the benchmark, which are the trainers that the row compares. A side is a
group of processes, which train when they get a command."""

import contextlib
import json
import math
import select
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO

import psutil

from benchmarks.launch import COMPILED, mpirun, start
from benchmarks.speed.case import Row, Variant
from benchmarks.speed.peers import environment
from benchmarks.speed.rounds import LeastTimes, busy_cpu_s, foreign_share

START_LIMIT_S = 180.0
ANSWER_LIMIT_S = 600.0
END_LIMIT_S = 20.0
LAUNCHER_END_S = 0.5  # Seconds in which a launcher may end after all its ranks have ended.
POLL_S = 0.5  # Seconds between two checks for processes that have ended without an answer.


class SideFailed(Exception):
    """The error for a side that has ended or hangs. The message contains the side's output."""


class SideTooSlow(SideFailed):
    """The error for a side that did not answer within its time limit, and was ended."""


class TimeIsOver(Exception):
    """The error for a benchmark that has used up its time. The side for which the benchmark was
    waiting has been ended."""


@dataclass(frozen=True)
class TimedSteps:
    """The results of the steps that a side trained after one command. `foreign_share` is the number
    of processor cores that other processes used during these steps."""

    time_s: float  # seconds from the first rank's start to the last rank's end
    losses: list[float]
    peak_memory_bytes: int
    foreign_share: float


class Side:
    """A context manager that starts all ranks of one side of a row, and ends them.

    If `variant` is None, the side is ptdmpi, which mpirun starts. Otherwise the side is the tool of
    the variant, and one process per rank is started. All processes have the environment of
    jobs/mpi-env.sh, and sleep while they wait for a command. A wait that is not over at the time
    `end_s` (of the clock time.monotonic) raises TimeIsOver.
    """

    def __init__(self, row: Row, variant: Variant | None, end_s: float = math.inf) -> None:
        self.row = row
        self.variant = variant
        self.end_s = end_s
        self.name = "ptdmpi" if variant is None else variant.tool
        self.ranks = row.sizes.ranks
        self.steps_done = 0
        self.streams: dict[TextIO, socket.socket] = {}  # the sockets of the ranks, in rank order
        self.processes: list[subprocess.Popen] = []

    def __enter__(self) -> Self:
        self.folder = tempfile.TemporaryDirectory(prefix="ptdmpi-bench-")
        place = Path(self.folder.name)
        self.log = (place / "log.txt").open("w+")
        self.listener = socket.socket(socket.AF_UNIX)
        try:
            self.listener.bind(str(place / "socket"))
            self.listener.listen()
            self._launch(place)
            self._greet(place)
        except BaseException as error:
            self._leave(error)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._leave(error)

    def _launch(self, place: Path) -> None:
        worker = ["-m", "benchmarks.speed.worker", self.name, str(place / "socket")]
        if self.variant is None:
            self.processes.append(start(mpirun(self.ranks, worker), self.log, extra=COMPILED))
            return
        settings = COMPILED | environment(self.variant.tool)
        for rank in range(self.ranks):
            extra = {**settings, "RANK": str(rank), "WORLD_SIZE": str(self.ranks)}
            self.processes.append(start([sys.executable, *worker], self.log, extra=extra))

    def _greet(self, place: Path) -> None:
        """Accept the connection of every rank, send each rank its job, and wait until the ranks
        have built their models."""
        job = {
            "row": self.row.to_json(),
            "variant": asdict(self.variant or Variant()),
            "store": str(place / "store"),
        }
        self.listener.settimeout(0.5)
        end_s = time.monotonic() + START_LIMIT_S
        while len(self.streams) < self.ranks:
            try:
                connection, _ = self.listener.accept()
            except TimeoutError:
                self._still_time()
                if time.monotonic() > end_s or any(p.poll() is not None for p in self.processes):
                    raise SideFailed(self._story("did not start")) from None
                continue
            connection.settimeout(None)
            self.streams[connection.makefile("rw")] = connection
        for stream in self.streams:
            self._say(stream, job)
        ready = {self._hear(stream, end_s)["rank"]: stream for stream in self.streams}
        self.streams = {ready[rank]: self.streams[ready[rank]] for rank in range(self.ranks)}

    def ask(self, limit_s: float = ANSWER_LIMIT_S, **command: Any) -> list[dict[str, Any]]:
        """Send a command to all ranks, and return their replies in rank order. Raises SideFailed if
        a rank has ended, and SideTooSlow after `limit_s` seconds."""
        for stream in self.streams:
            self._say(stream, command)
        end_s = time.monotonic() + limit_s
        return [self._hear(stream, end_s) for stream in self.streams]

    def train(self, count: int, limit_s: float = ANSWER_LIMIT_S) -> TimedSteps:
        """Let the side train the next `count` steps. Raises the errors that `ask` raises."""
        begin_s = time.perf_counter()
        busy_before = busy_cpu_s()
        own_before = family_cpu_s()
        replies = self.ask(limit_s, steps=count, first=self.steps_done)
        wall_s = time.perf_counter() - begin_s
        busy_s = busy_cpu_s() - busy_before
        own_s = family_cpu_s() - own_before
        self.steps_done += count
        known = [reply["losses"] for reply in replies if None not in reply["losses"]]
        return TimedSteps(
            time_s=max(r["end_s"] for r in replies) - min(r["begin_s"] for r in replies),
            losses=[sum(of_step) / len(known) for of_step in zip(*known, strict=True)],
            peak_memory_bytes=max(reply["peak_memory_bytes"] for reply in replies),
            foreign_share=foreign_share(busy_s, own_s, wall_s),
        )

    def limits(self) -> LeastTimes:
        """Measure the minimum times of a step (see `LeastTimes`), and return the times of the rank
        with the most work."""
        times = [LeastTimes(*reply["limits_s"]) for reply in self.ask(limits=True)]
        return LeastTimes(max(rank.gemm_s for rank in times), max(rank.both_s for rank in times))

    def profile(self) -> list[dict[str, float]]:
        """Let ptdmpi train the next step under a profiler. Return the seconds of each kind of work
        (`OurTrainer.profile`) of each rank."""
        replies = self.ask(profile=self.steps_done)
        self.steps_done += 1
        return [reply["seconds"] for reply in replies]

    def _say(self, stream: TextIO, message: dict[str, Any]) -> None:
        try:
            stream.write(json.dumps(message) + "\n")
            stream.flush()
        except OSError as error:
            raise SideFailed(self._story(f"is gone ({error})")) from error

    def _hear(self, stream: TextIO, end_s: float) -> dict[str, Any]:
        """Wait for the answer of the rank with the connection `stream`, and return the answer.
        Raises SideTooSlow at the time `end_s` (of the clock time.monotonic). Raises SideFailed if
        any rank has ended, because the awaited rank may wait forever for the ended rank."""
        while not select.select([self.streams[stream]], [], [], POLL_S)[0]:
            self._still_time()
            if time.monotonic() > end_s:
                raise SideTooSlow(self._story("did not answer in time"))
            if any(process.poll() is not None for process in self.processes):
                raise SideFailed(self._story("ended while another was waited for"))
        try:
            line = stream.readline()
        except OSError as error:
            raise SideFailed(self._story(f"does not answer ({error})")) from error
        if not line:
            raise SideFailed(self._story("ended"))
        return json.loads(line)

    def _still_time(self) -> None:
        if time.monotonic() > self.end_s:
            self._end()
            raise TimeIsOver

    def _end(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.terminate()
        for process in self.processes:
            _wait(process)

    def _story(self, what: str) -> str:
        self._end()
        self.log.seek(0)
        return f"{self.name}, row {self.row.id}: a rank {what}\n{self.log.read()}"

    def _leave(self, error: BaseException | None) -> None:
        """End the ranks: immediately if this program was interrupted, and otherwise after their
        current work."""
        if error is not None and not isinstance(error, Exception):
            for process in self.processes:
                _kill(process)
        self._close()

    def _close(self) -> None:
        for stream, connection in self.streams.items():
            stream.close()
            connection.close()  # a rank ends when its connection is closed
        for process in self.processes:
            _wait(process)
        self.listener.close()
        self.log.close()
        self.folder.cleanup()


def family_cpu_s() -> float:
    """Return the CPU time of this process and of all its descendants. The descendants include the
    processes of waiting sides, in which gloo's threads wake up a hundred times per second."""
    me = psutil.Process()
    times = [process.cpu_times() for process in (me, *me.children(recursive=True))]
    return sum(process.user + process.system for process in times)


def _kill(process: subprocess.Popen) -> None:
    """Kill all children of a process, and then the process itself. A process with children is a
    launcher. It has LAUNCHER_END_S seconds to end by itself, so that it can remove its files."""
    if process.poll() is not None:
        return
    children = psutil.Process(process.pid).children(recursive=True)
    for child in children:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    if children:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(LAUNCHER_END_S)
    process.kill()


def _wait(process: subprocess.Popen) -> None:
    """Wait until a process of a side has ended. If it does not end within END_LIMIT_S seconds,
    terminate it, and then kill it."""
    try:
        for end in (lambda: None, process.terminate, process.kill):
            end()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(END_LIMIT_S)
                return
        process.wait()
    except BaseException:
        _kill(process)
        raise
