"""All that watches over one rank of a run: where it is, whether it gets on, what it is asked."""

import os
import statistics
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ptdmpi.comm.world import Axes, World
from ptdmpi.config import Config
from ptdmpi.watch.heartbeat import Heartbeat, Judge
from ptdmpi.watch.lock import RunLock
from ptdmpi.watch.requests import Asked, Requests, Save, StopRequest
from ptdmpi.watch.slow import SlowRanks
from ptdmpi.watch.stopwatch import Place
from ptdmpi.watch.whereabouts import Ranks

LAST_STEPS = 100  # how long a step takes is judged by so many


class Lookout:
    """The heart that beats, the requests and the lock of one rank; made by all ranks together.

    `place` is where the rank is: whoever works writes it. `durations` are the seconds of the last
    steps. `say` prints and logs a line.
    """

    def __init__(
        self,
        config: Config,
        axes: Axes,
        world: World,
        signals: StopRequest,
        say: Callable[[str], None],
    ) -> None:
        run, hosts = config.run, [process.host for process in world.processes]
        self.axes, self.path = axes, Path(run.dir)
        self.place = Place()
        self.ranks = Ranks(axes.grid, hosts)
        self.durations: deque[float] = deque(maxlen=LAST_STEPS)
        minutes = (run.max_minutes, config.checkpoint.every_minutes)
        self.requests = Requests(signals, self.path, hosts, *minutes)
        self.judge: Judge | None = None
        self.slow: SlowRanks | None = None
        if world.rank == 0:
            shares_cores = world.local_size * run.threads > (os.cpu_count() or 1)
            self.judge = Judge(self.ranks, run.stall_s, say)
            self.slow = SlowRanks(self.judge, self.ranks, shares_cores, say)
        self._lock: RunLock | None = None
        self.heartbeat = Heartbeat(
            axes, self.ranks, self.place, signals, self.path, self.judge, run.stall_s
        )
        if not self.heartbeat.start():
            say("warning: this MPI has no MPI_THREAD_MULTIPLE: hangs will not be explained")
        world.last_words = self.heartbeat.failed

    def take_lock(self) -> None:
        """Rank 0 alone. Before anything is read: what another run is writing now may be gone.

        Raises InputError if another run holds the directory.
        """
        self._lock = RunLock(self.path, self.requests.signals.show)

    def computed(self, compute_s: float, elapsed_s: float) -> None:
        """A step is computed: how long this rank's own work in it took, and all of it."""
        self.place.compute_s.append(compute_s)
        self.requests.stepped(elapsed_s)

    def usual_s(self, elapsed_s: float) -> float:
        """The median of the last steps' seconds, of which the newest took `elapsed_s`."""
        self.durations.append(elapsed_s)
        if self.judge is not None:
            self.judge.step_s = max(self.durations)
        return statistics.median(self.durations)

    def slow_ranks(self, step: int) -> list[dict[str, Any]]:
        """Which ranks compute slowly, for the record of a step; empty but on rank 0."""
        return [] if self.slow is None else self.slow.after(step)

    def vote(self, memory_bytes: int) -> Asked:
        """What the ranks want next, and the most memory that one of them has used; the same on all
        of them. One small message: every rank votes behind every step."""
        world = self.axes.world
        stop, save, memory = world.greatest((*self.requests.mine(world.rank), memory_bytes))
        return Asked(self.requests.reason(stop), Save(save), memory)

    def obeyed(self, name: str) -> None:
        """The file "STOP" or "SAVE" has done its work; rank 0 removes it: it counts once."""
        if self.axes.world.rank == 0:
            self.requests.obeyed(name)

    def stops(self) -> None:
        """The training says itself that it stops: the wish for it needs no other answer."""
        if self.judge is not None:
            self.judge.stopping = True

    def finish(self) -> None:
        """The orderly end, on all ranks together."""
        self.place.enter("ending")
        self.heartbeat.finish()

    def close(self) -> None:
        """End the thread and let go of the directory, without the other ranks; more than once, if
        need be."""
        self.heartbeat.close()
        if self._lock is not None:
            self._lock.close()
            self._lock = None
