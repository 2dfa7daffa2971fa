"""The monitoring of a run on one rank: progress, heartbeat, requests to stop or save, the lock of
the run directory, and the search for slow ranks."""

import os
import statistics
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ptdmpi.base.outside import explained
from ptdmpi.comm.world import Axes, World
from ptdmpi.config import Config
from ptdmpi.watch.heartbeat import Heartbeat, Judge
from ptdmpi.watch.lock import RunLock
from ptdmpi.watch.requests import Asked, Requests, Save, StopRequest
from ptdmpi.watch.slow import SlowRanks
from ptdmpi.watch.stopwatch import Place
from ptdmpi.watch.whereabouts import Ranks

LAST_STEPS = 100  # number of last steps whose durations are stored


class Lookout:
    """The objects that monitor a run on one rank: the heartbeat, the requests to stop or save, and
    the lock of the run directory. All ranks must create their `Lookout` at the same time.

    `place` is the present activity of the rank; the training loop and the engine update it.
    `durations` is a list of the durations of the last steps, in seconds. `say` is a function that
    prints and logs a line.
    """

    def __init__(
        self,
        config: Config,
        axes: Axes,
        world: World,
        signals: StopRequest,
        *,
        say: Callable[[str], None],
    ) -> None:
        run = config.run
        hosts = [process.host for process in world.processes]
        self.axes = axes
        self.path = Path(run.dir)
        self.place = Place()
        self.ranks = Ranks(axes.grid, hosts)
        self.durations: deque[float] = deque(maxlen=LAST_STEPS)
        self.requests = Requests(
            signals,
            self.path,
            hosts,
            max_minutes=run.max_minutes,
            save_minutes=config.checkpoint.every_minutes,
        )
        self.judge: Judge | None = None
        self.slow: SlowRanks | None = None
        if world.rank == 0:
            shares_cores = world.local_size * run.threads > (os.cpu_count() or 1)
            self.judge = Judge(self.ranks, run.stall_s, say)
            self.slow = SlowRanks(self.judge, self.ranks, shares_cores, say)
        self._lock: RunLock | None = None
        self.heartbeat = Heartbeat(
            axes,
            self.ranks,
            self.place,
            signals,
            directory=self.path,
            judge=self.judge,
            stall_s=run.stall_s,
        )
        if not self.heartbeat.start():
            say("warning: this MPI has no MPI_THREAD_MULTIPLE: hangs will not be explained")
        world.last_words = self.heartbeat.failed

    def take_lock(self) -> None:
        """Lock the run directory. Only rank 0 calls this method, before it reads a file in the
        directory.

        Raise InputError if another run has the lock, because that run may be writing to the
        directory.
        """
        self._lock = RunLock(self.path, self.requests.signals.show)

    def computed(self, compute_s: float, elapsed_s: float) -> None:
        """Record a completed step. The step took `elapsed_s` seconds, and this rank's own work in
        the step took `compute_s` seconds."""
        self.place.compute_s.append(compute_s)
        self.requests.stepped(elapsed_s)

    def usual_s(self, elapsed_s: float) -> float:
        """Record that a step took `elapsed_s` seconds. Return the median duration of the last
        steps, in seconds."""
        self.durations.append(elapsed_s)
        if self.judge is not None:
            self.judge.step_s = max(self.durations)
        return statistics.median(self.durations)

    def slow_ranks(self, step: int) -> list[dict[str, Any]]:
        """Return the slow ranks, for the record of a step. Only rank 0 knows the slow ranks; on
        other ranks the list is empty."""
        return [] if self.slow is None else self.slow.after(step)

    def vote(self, memory_bytes: int, mistake: Exception | None = None) -> Asked:
        """Let all ranks vote, after a step, whether to stop and whether to save. All ranks must
        call this method. Return the result, which is the same on all ranks.

        `memory_bytes` is the peak memory of this rank. The result contains the greatest peak memory
        of all ranks. `mistake` is the error with which this rank has failed to read its data; the
        run then saves and ends on all ranks. Without such an error, a vote needs only one small
        collective.
        """
        world = self.axes.world
        self.requests.mistake = self.requests.mistake or mistake
        ballot = self.requests.mine(world.rank)
        stop, save, memory = world.greatest((ballot.stop, ballot.save, memory_bytes))
        text, failed = "", self.requests.failed(stop)
        if failed is not None:
            text = world.broadcast_object(_text_of(self.requests.mistake), failed)
        return Asked(self.requests.reason(stop), Save(save), memory, text)

    def obeyed(self, name: str) -> None:
        """On rank 0, remove the file `name` ("STOP" or "SAVE") after the request was carried
        out."""
        if self.axes.world.rank == 0:
            self.requests.obeyed(name)

    def stops(self) -> None:
        """Record that the training loop prints the reason for the stop. If a signal that requests a
        stop arrives afterwards, the judge (the object on rank 0 that watches all ranks) prints no
        line about it."""
        if self.judge is not None:
            self.judge.stopping = True

    def finish(self) -> None:
        """End the monitoring normally, after the training. All ranks call this method together."""
        self.place.enter("ending")
        self.heartbeat.finish()

    def close(self) -> None:
        """End the heartbeat thread and release the lock of the run directory, without communication
        with other ranks. `close` may be called several times."""
        self.heartbeat.close()
        if self._lock is not None:
            self._lock.close()
            self._lock = None


def _text_of(mistake: Exception | None) -> str:
    """Return the message of an error in one line; "" if there is no error."""
    if mistake is None:
        return ""
    explanation = explained(mistake)
    return (explanation and explanation[0]) or str(mistake) or type(mistake).__name__
