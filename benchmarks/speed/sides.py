"""The sides of a row as groups of processes that train on command."""

import json
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

from benchmarks.launch import mpirun, start
from benchmarks.speed.case import Row, Variant
from benchmarks.speed.peers import environment
from benchmarks.speed.rounds import busy_cpu_s, foreign_share

START_LIMIT_S = 180.0
ANSWER_LIMIT_S = 600.0
END_LIMIT_S = 20.0


class SideFailed(Exception):
    """A side ended or hung; the message holds what it wrote."""


class SideTooSlow(SideFailed):
    """A side has not answered within its limit and was ended."""


@dataclass(frozen=True)
class TimedSteps:
    """What a side did in one command."""

    time_s: float  # from the first rank's start to the last rank's end
    losses: list[float]
    peak_memory_bytes: int
    foreign_share: float


class Side:
    """All ranks of one side of a row, started on entering and ended on leaving.

    `variant` None is this project, under mpirun; otherwise its tool, one process per rank. All get
    the environment of jobs/mpi-env.sh, and sleep while they have no command.
    """

    def __init__(self, row: Row, variant: Variant | None) -> None:
        self.row, self.variant = row, variant
        self.name = "ptdmpi" if variant is None else variant.tool
        self.ranks = row.sizes.ranks
        self.steps_done = 0
        self.connections: list[socket.socket] = []
        self.streams: list[TextIO] = []
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
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._close()

    def _launch(self, place: Path) -> None:
        worker = ["-m", "benchmarks.speed.worker", self.name, str(place / "socket")]
        if self.variant is None:
            self.processes.append(start(mpirun(self.ranks, worker), self.log))
            return
        settings = environment(self.variant.tool)
        for rank in range(self.ranks):
            extra = {**settings, "RANK": str(rank), "WORLD_SIZE": str(self.ranks)}
            self.processes.append(start([sys.executable, *worker], self.log, extra=extra))

    def _greet(self, place: Path) -> None:
        """Accept every rank, tell it its job, and wait until its model stands."""
        job = {
            "row": self.row.to_json(),
            "variant": asdict(self.variant or Variant()),
            "store": str(place / "store"),
        }
        self.listener.settimeout(0.5)
        end = time.monotonic() + START_LIMIT_S
        while len(self.streams) < self.ranks:
            try:
                connection, _ = self.listener.accept()
            except TimeoutError:
                if time.monotonic() > end or any(p.poll() is not None for p in self.processes):
                    raise SideFailed(self._story("did not start")) from None
                continue
            connection.settimeout(ANSWER_LIMIT_S)
            self.connections.append(connection)
            self.streams.append(connection.makefile("rw"))
        for stream in self.streams:
            self._say(stream, job)
        ready = {self._hear(stream)["rank"]: stream for stream in self.streams}
        self.streams = [ready[rank] for rank in range(self.ranks)]

    def ask(self, **command: Any) -> list[dict[str, Any]]:
        """Give all ranks a command; their replies in order of ranks. Raises SideFailed."""
        for stream in self.streams:
            self._say(stream, command)
        return [self._hear(stream) for stream in self.streams]

    def train(self, count: int, limit_s: float = ANSWER_LIMIT_S) -> TimedSteps:
        """The next `count` steps. Raises SideTooSlow after `limit_s`."""
        for connection in self.connections:
            connection.settimeout(limit_s)
        clock, busy = time.perf_counter(), busy_cpu_s()
        own = family_cpu_s()
        replies = self.ask(steps=count, first=self.steps_done)
        wall_s, busy_s = time.perf_counter() - clock, busy_cpu_s() - busy
        own_s = family_cpu_s() - own
        self.steps_done += count
        known = [reply["losses"] for reply in replies if None not in reply["losses"]]
        return TimedSteps(
            time_s=max(r["end_s"] for r in replies) - min(r["begin_s"] for r in replies),
            losses=[sum(of_step) / len(known) for of_step in zip(*known, strict=True)],
            peak_memory_bytes=max(reply["peak_memory_bytes"] for reply in replies),
            foreign_share=foreign_share(busy_s, own_s, wall_s),
        )

    def limits(self) -> tuple[float, float]:
        """Seconds of the bare linear GEMMs of one step, and of its attention at the best way, on
        the rank that has most of each."""
        replies = self.ask(limits=True)
        gemms, attention = zip(*(reply["limits_s"] for reply in replies), strict=True)
        return max(gemms), max(attention)

    def _say(self, stream: TextIO, message: dict[str, Any]) -> None:
        try:
            stream.write(json.dumps(message) + "\n")
            stream.flush()
        except OSError as error:
            raise SideFailed(self._story(f"is gone ({error})")) from error

    def _hear(self, stream: TextIO) -> dict[str, Any]:
        try:
            line = stream.readline()
        except TimeoutError:
            raise SideTooSlow(self._story("did not answer in time")) from None
        except OSError as error:
            raise SideFailed(self._story(f"does not answer ({error})")) from error
        if not line:
            raise SideFailed(self._story("ended"))
        return json.loads(line)

    def _story(self, what: str) -> str:
        for process in self.processes:
            if process.poll() is None:
                process.terminate()
                _wait(process)
        self.log.seek(0)
        return f"{self.name}, row {self.row.id}: a rank {what}\n{self.log.read()}"

    def _close(self) -> None:
        for stream in self.streams:
            stream.close()
        for connection in self.connections:
            connection.close()  # the end of its commands ends a rank
        for process in self.processes:
            _wait(process)
        self.listener.close()
        self.log.close()
        self.folder.cleanup()


def family_cpu_s() -> float:
    """CPU time of this process and of all that it has started: of the sides that wait too, for
    gloo's threads wake a hundred times a second in them."""
    me = psutil.Process()
    times = (each.cpu_times() for each in (me, *me.children(recursive=True)))
    return sum(each.user + each.system for each in times)


def _wait(process: subprocess.Popen) -> None:
    """Until it has ended by itself, by request, or by force."""
    for end in (lambda: None, process.terminate, process.kill):
        end()
        try:
            process.wait(END_LIMIT_S)
            return
        except subprocess.TimeoutExpired:
            continue
    process.wait()
