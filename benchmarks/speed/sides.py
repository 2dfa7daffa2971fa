"""The sides of a row as groups of processes that train on command."""

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
POLL_S = 0.5  # an answer ends a wait at once; this is for what has ended without one


class SideFailed(Exception):
    """A side ended or hung; the message holds what it wrote."""


class SideTooSlow(SideFailed):
    """A side has not answered within its limit and was ended."""


class TimeIsOver(Exception):
    """So is all that the benchmark has; whoever was waited for was ended."""


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
    the environment of jobs/mpi-env.sh, and sleep while they have no command. Behind `end_s` (of
    time.monotonic) nobody is waited for: TimeIsOver.
    """

    def __init__(self, row: Row, variant: Variant | None, end_s: float = math.inf) -> None:
        self.row, self.variant, self.end_s = row, variant, end_s
        self.name = "ptdmpi" if variant is None else variant.tool
        self.ranks = row.sizes.ranks
        self.steps_done = 0
        self.streams: dict[TextIO, socket.socket] = {}  # of the ranks, in their order
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
            self.processes.append(start(mpirun(self.ranks, worker), self.log, extra=COMPILED))
            return
        settings = COMPILED | environment(self.variant.tool)
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
        """Give all ranks a command; their replies in order of ranks. Raises SideFailed, of which
        SideTooSlow after `limit_s`."""
        for stream in self.streams:
            self._say(stream, command)
        end_s = time.monotonic() + limit_s
        return [self._hear(stream, end_s) for stream in self.streams]

    def train(self, count: int, limit_s: float = ANSWER_LIMIT_S) -> TimedSteps:
        """The next `count` steps. Raises SideTooSlow after `limit_s`."""
        clock, busy = time.perf_counter(), busy_cpu_s()
        own = family_cpu_s()
        replies = self.ask(limit_s, steps=count, first=self.steps_done)
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

    def limits(self) -> LeastTimes:
        """What the rank that has most of it cannot do without in one step, as of now."""
        told = [LeastTimes(*reply["limits_s"]) for reply in self.ask(limits=True)]
        return LeastTimes(max(each.gemm_s for each in told), max(each.both_s for each in told))

    def _say(self, stream: TextIO, message: dict[str, Any]) -> None:
        try:
            stream.write(json.dumps(message) + "\n")
            stream.flush()
        except OSError as error:
            raise SideFailed(self._story(f"is gone ({error})")) from error

    def _hear(self, stream: TextIO, end_s: float) -> dict[str, Any]:
        """A rank's answer. It is not waited for behind `end_s` (of time.monotonic), nor where
        another rank has ended, on which this one may wait forever."""
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

    def _close(self) -> None:
        for stream, connection in self.streams.items():
            stream.close()
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
