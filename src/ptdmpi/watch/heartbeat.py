"""The heartbeat: a thread of each rank that reports the rank's progress to rank 0, even if the main
thread hangs.

Rank 0 has a table with the newest report of each rank. After a stall or a failure, rank 0 prints a
table with the activity of each rank, and with the ranks for which each rank waits. Rank 0 also
makes every rank write the stacks of its threads to a file. Then rank 0 ends the job. Rank 1
monitors rank 0 (`deputy.py`).
"""

import atexit
import contextlib
import faulthandler
import math
import os
import signal
import statistics
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from mpi4py import MPI

from ptdmpi.base.disk import write_whole
from ptdmpi.base.launched import launcher_kills
from ptdmpi.comm.mailbox import Mailbox
from ptdmpi.comm.world import Axes
from ptdmpi.watch.deputy import Deputy
from ptdmpi.watch.requests import STOPPED_EXIT_CODE, StopRequest
from ptdmpi.watch.stopwatch import COMPUTE_STEPS, Place
from ptdmpi.watch.whereabouts import (
    BEAT_S,
    LEAST_SILENCE_S,
    MISSED_BEATS,
    TERMINAL_ROWS,
    Ranks,
    Report,
    Seen,
    culprits,
    describe,
    idle_s,
    rows,
)
from ptdmpi.watch.wires import Wires

# Waiting counts as a stall only if it takes more than STALL_STEPS times as long as the longest of
# the last training steps. During the start-up, a save or a validation, the time limit is PATIENCE
# times longer, because a single operation of these phases may take long without an error.
STALL_STEPS = 5
PATIENCE = 10
# Some launchers deliver a signal twice. Only a signal that arrives at least SECOND_SIGNAL_S seconds
# after the first signal counts as a second request of the user.
SECOND_SIGNAL_S = 5.0
DUPLICATE_S = 0.5  # signals to one rank within this number of seconds count as one signal.
# Time limit for all ranks to write their stacks, after rank 0 has found a stall or a failure.
COLLECT_S = 5.0
# the messages that rank 0 sends to the other ranks
ALIVE, WRITE_STACKS = "I am alive", "write your stacks"


class Heartbeat:
    """The heartbeat thread of one rank, and the data that the thread uses. All ranks must create
    their `Heartbeat` at the same time. Afterwards, each rank calls `start`."""

    def __init__(
        self,
        axes: Axes,
        ranks: Ranks,
        place: Place,
        signals: StopRequest,
        *,
        directory: Path,
        judge: "Judge | None",
        stall_s: float,
    ) -> None:
        self.axes = axes
        self.ranks = ranks
        self.place = place
        self.signals = signals
        self.judge = judge
        self.wires = Wires(axes)
        self.deputy = Deputy(ranks, directory, stall_s)
        self.mailbox = Mailbox(axes.world.control)
        self._beat_s = time.monotonic()
        self._noted: list[tuple[int, float]] = []
        self._failure: tuple[float, str] | None = None
        self._shown = False
        self._ended = threading.Event()
        self._due_s = 0.0
        # this is a daemon thread: if the thread hangs inside MPI, the process can still end
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def start(self) -> bool:
        """Start the heartbeat thread. Return False if the MPI library does not allow calls from a
        second thread."""
        if not Mailbox.works_in_a_thread():
            return False
        # MPI is finalized at exit, and no thread may call MPI afterwards
        atexit.register(self.close)
        if self.axes.world.rank == 1:
            # rank 0 is alive now, because all ranks have just created their heartbeats together
            self.deputy.hear(time.monotonic())
        self._thread.start()
        return True

    def failed(self, error: BaseException) -> None:
        """Report the exception `error` of this rank to rank 0, which prints the table of all ranks
        and ends the job. If rank 0 does not end the job within some seconds, return."""
        notes = [line for note in getattr(error, "__notes__", ()) for line in note.splitlines()]
        where = f" ({notes[0].rstrip(':')})" if notes else ""
        first = str(error).partition("\n")[0]
        # if a transport of this rank has failed before, this failure may have caused `error`
        wires = self.wires.failed
        cause = f"; {wires}" if wires not in first else ""
        self._failure = (time.time(), f"{type(error).__name__}: {first}{where}{cause}")
        if self._thread.is_alive():
            self.signals.wake()
            self._thread.join(COLLECT_S + 3 * BEAT_S)

    def finish(self) -> None:
        """End the heartbeat normally, after the training. All ranks must call this method. Rank 0
        waits for the last report of each rank."""
        if not self._thread.is_alive():
            return
        self.close()
        self.mailbox.send(self._report(leaves=True), 0)
        if self.judge is None:
            return
        # the thread may have received the last reports of some ranks while rank 0 was still
        # training
        waiting = {rank for rank, seen in self.judge.table.items() if not seen.report.leaves}
        end_s = time.monotonic() + COLLECT_S
        while waiting and time.monotonic() < end_s:
            waiting -= {rank for rank, report in self.mailbox.receive() if report.leaves}

    def close(self) -> None:
        """End the thread without a message to other ranks. `close` may be called several times."""
        self._ended.set()
        if self._thread.is_alive():
            self.signals.wake()
            self._thread.join()
        atexit.unregister(self.close)

    def _run(self) -> None:
        self.axes.clock.asked_from_here()
        while not self._ended.is_set():
            try:
                self._beat()
            except MPI.Exception:
                # MPI raises an exception if a rank was lost. The remaining ranks then create a new
                # world with a new heartbeat. Abort the transports: the main thread may be waiting
                # for its device, and the device may be waiting for the lost rank.
                self.axes.abort()
                return
            except Exception as error:  # a device that has failed raises an error at every call
                if self.wires.deaf:
                    raise
                self._ignore_device(error)

    def _ignore_device(self, error: Exception) -> None:
        """Report an error of the device, or of the device's library, as the failure of this rank.
        The main thread either raises the same error or hangs. After this call, the heartbeat
        queries only the host, not the device.
        """
        self.wires.deaf = True
        self.place.forget_device()
        if not self._failure:
            first = str(error).partition("\n")[0]
            self._failure = (time.time(), f"its device: {type(error).__name__}: {first}")
        self.axes.abort()

    def _beat(self) -> None:
        """Wait until a signal arrives or a heartbeat is due. Then send a report to rank 0 and
        receive messages. Rank 0 also looks for failures and stalls.
        """
        hurried = self.judge is not None and self.judge.verdict is not None
        came = self.signals.wait(0.05 if hurried else BEAT_S)
        now_s = time.monotonic()
        if now_s - self._beat_s > LEAST_SILENCE_S:
            self.deputy.wake(now_s)
        self._beat_s = now_s
        for number in came:
            if not self._noted or now_s - self._noted[-1][1] > DUPLICATE_S:
                self._noted.append((int(number), now_s))
        if not self._failure and (stuck := self.wires.stuck(now_s)):
            self._failure = (time.time(), f"its device hangs after a failure: {stuck}")
        if came or (self._failure and not self._shown) or now_s >= self._due_s:
            self._due_s = now_s + self.ranks.beat_s
            self.mailbox.send(self._report(), 0)
            if self.judge is not None and self.axes.world.size > 1:
                self.mailbox.send(ALIVE, 1)
        for rank, message in self.mailbox.receive():
            if isinstance(message, Report):
                if self.judge is not None:  # only rank 0 gets reports and has a judge
                    self.judge.hear(rank, message, now_s)
            elif message == ALIVE:
                self.deputy.hear(now_s)
            elif not self._shown:
                self._shown = True
                self._write_stacks()
                self.mailbox.send(self._report(), 0)
        if self.judge is not None:
            self._follow(self.judge, now_s)
        elif self.deputy.replaces(now_s):
            self._replace_the_judge(now_s)

    def _replace_the_judge(self, now_s: float) -> None:
        """On rank 1, give all other ranks time to write their stacks, and then end the job, because
        rank 0 is silent."""
        for rank in range(1, self.axes.world.size):
            self.mailbox.send(WRITE_STACKS, rank)
        self.deputy.pronounce(now_s)
        self._write_stacks()
        time.sleep(1.5 * BEAT_S)  # the other ranks write their stacks during this pause
        self.mailbox.abort(1)

    def _follow(self, judge: "Judge", now_s: float) -> None:
        """On rank 0, do what the judge has decided: request the stacks of all ranks, print the
        table of ranks, or end the job."""
        if judge.look(now_s):
            for rank in range(self.axes.world.size):
                self.mailbox.send(WRITE_STACKS, rank)
        if judge.stop_at_once:
            self.mailbox.abort(STOPPED_EXIT_CODE)
        if judge.verdict is not None and judge.complete(now_s):
            judge.pronounce(self.deputy.directory)
            time.sleep(0.2)  # give the launcher time to forward the lines before the abort
            self.mailbox.abort(1)

    def _report(self, leaves: bool = False) -> Report:
        doing = self.place.now()
        now_s = time.monotonic()
        axis, collective = self.wires.inside()
        compute_s = 0.0
        if len(self.place.compute_s) == COMPUTE_STEPS:
            compute_s = statistics.median(tuple(self.place.compute_s))
        return Report(
            phase=self.place.phase,
            step=self.place.step,
            kind=doing.kind,
            op=doing.op,
            peer=doing.peer,
            axis=axis,
            collective=collective,
            age_s=time.perf_counter() - doing.since_s,
            compute_s=compute_s,
            signals=tuple((number, now_s - at_s) for number, at_s in self._noted),
            failure=self._failure,
            shown=self._shown,
            leaves=leaves,
        )

    def _write_stacks(self) -> None:
        """Write the stacks of this rank's threads to a file. An error of the disk is ignored,
        because the table of ranks must be printed even if the stacks cannot be written."""
        with contextlib.suppress(OSError):
            self._write_stack_file(self.deputy.directory / "stacks")

    def _write_stack_file(self, folder: Path) -> None:
        world = self.axes.world
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / f"rank-{world.rank:05d}.txt", "w", encoding="utf-8") as file:
            name = self.ranks.name(world.rank)
            doing = describe(self._report())
            file.write(f"{name}, process {os.getpid()}, step {self.place.step}: {doing}\n\n")
            file.flush()
            faulthandler.dump_traceback(file, all_threads=True)


class Judge:
    """The table with the newest report of each rank, and the decision whether the job must end.
    Only rank 0 has a `Judge`. `say` is a function that prints and logs a line.

    `stall_s` is the number of seconds of waiting after which the job must end; if it is 0, waiting
    never counts as a stall. `step_s` is the duration of the longest of the last steps, in seconds.
    """

    def __init__(self, ranks: Ranks, stall_s: float, say: Callable[[str], None]) -> None:
        self.ranks = ranks
        self.stall_s = stall_s
        self.say = say
        self.step_s = 0.0
        beginning = Seen(
            Report(
                phase="start-up",
                step=0,
                kind="",
                op="",
                peer=None,
                axis="",
                collective="",
                age_s=0.0,
            ),
            time.monotonic(),
        )
        self.table: dict[int, Seen] = dict.fromkeys(range(ranks.grid.size), beginning)
        self.verdict: str | None = None
        # a function that is called with the first line about a failure or a stall, before the job
        # ends
        self.ended: Callable[[str], None] = lambda why: None
        self.stop_at_once = False
        self.stopping = False  # True if the training loop has already printed that it stops
        self._failed: list[int] = []
        self._deadline_s = 0.0
        self._acknowledged_s: float | None = None
        self._called_silent: dict[int, float] = {}  # silent rank -> time of its last report
        self._next_look_s = 0.0
        self._looked_s = math.inf
        self._awake_s = 0.0

    def hear(self, rank: int, report: Report, now_s: float) -> None:
        """Store the newest report of `rank` in the table of ranks. If the report has new signals or
        a failure, react to them."""
        known = len(self.table[rank].report.signals)
        self.table[rank] = Seen(report, now_s)
        for number, age_s in report.signals[known:]:
            self._signal(rank, number, now_s - age_s, now_s)
        if report.failure and rank not in self._failed:
            self._failed = sorted([*self._failed, rank], key=self._failure)

    def look(self, now_s: float) -> bool:
        """Look for failures and stalls in the newest reports of all ranks. Return True when the
        first failure or stall is found, and False in all later calls. If the result is True, the
        caller must ask all ranks to write their stacks."""
        if self.verdict is not None:
            return False
        if now_s - self._looked_s > LEAST_SILENCE_S:
            # This process itself was suspended, perhaps together with all other ranks, so all
            # reports in the table are old. Wait until the ranks have had time to send new reports.
            self._awake_s = now_s + LEAST_SILENCE_S
            self._called_silent.clear()
        self._looked_s = now_s
        if self._failed:
            self.verdict = "a rank failed"
        elif now_s >= self._next_look_s:
            self._next_look_s = now_s + self.ranks.beat_s
            if now_s < self._awake_s:
                return False
            self._warn_of_silence(now_s)
            if self._stalls(now_s):
                self.verdict = "no rank gets on"
        self._deadline_s = now_s + COLLECT_S
        return self.verdict is not None

    def complete(self, now_s: float) -> bool:
        """Return True if every rank that still sends reports has written its stacks, or if the time
        limit for writing stacks has passed.
        """
        begun_s = self._deadline_s - COLLECT_S
        missed_s = MISSED_BEATS * self.ranks.beat_s
        shown = all(
            seen.report.shown or begun_s - seen.at_s > missed_s for seen in self.table.values()
        )
        return shown or now_s > self._deadline_s

    def pronounce(self, directory: Path) -> None:
        """Print the table of ranks, beginning with the ranks at fault, and write the full table to
        a file in `directory`."""
        now_s = time.monotonic()
        first = self._failed or culprits(self.table, self.ranks, now_s)
        headings = []
        for rank in self._failed:
            headings.append(f"failed: {self.ranks.name(rank)}: {self._failure(rank)[1]}")
        if not self._failed:
            idle = f"stall: for {idle_s(self.table, now_s):.0f} s no rank has begun anything"
            who = f"held up by {self.ranks.name(first[0])}" if first else "they wait in a circle"
            headings.append(f"{idle}; {who}")
        lines = rows(self.table, self.ranks, now_s, first)
        path = directory / "stacks" / "table.txt"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, "\n".join([*headings, *lines]) + "\n")
        except OSError as error:  # the terminal shows the table even if the file cannot be written
            headings.append(f"{path}: {error.strerror}")
        if len(lines) > TERMINAL_ROWS + 1:
            lines = [*lines[: TERMINAL_ROWS + 1], f"... all {len(self.table)} ranks: {path}"]
        shown = sum(seen.report.shown for seen in self.table.values())
        lines.append(f"stacks of {shown} of {len(self.table)} ranks: {directory / 'stacks'}")
        for line in [*headings, *lines]:
            self.say(line)
        sys.stdout.flush()
        self.ended(headings[0])

    def compute_s(self) -> dict[int, float]:
        """Return a dict: rank -> seconds of the rank's own work in a step. Return an empty dict
        until all ranks have reported this number."""
        values = {rank: seen.report.compute_s for rank, seen in self.table.items()}
        return values if all(values.values()) else {}

    def _failure(self, rank: int) -> tuple[float, str]:
        return self.table[rank].report.failure or (0.0, "")

    def _stalls(self, now_s: float) -> bool:
        """Return True if no rank has begun a new activity for longer than the time limit."""
        limit_s = max(self.stall_s, STALL_STEPS * self.step_s)
        quiet_s = {rank: now_s - seen.at_s for rank, seen in self.table.items()}
        frozen = max(quiet_s.values()) > max(self.stall_s, LEAST_SILENCE_S)
        heard = [
            self.table[rank].report.phase
            for rank, since_s in quiet_s.items()
            if since_s <= MISSED_BEATS * self.ranks.beat_s
        ]
        # Outside the training, a rank may be busy for a long time without an error. Only the phases
        # of ranks that still send reports are used, because the phase of a silent rank is out of
        # date.
        if not frozen and any(phase != "training" for phase in heard):
            limit_s *= PATIENCE
        return self.stall_s > 0 and idle_s(self.table, now_s) > limit_s

    def _signal(self, rank: int, number: int, came_s: float, now_s: float) -> None:
        """Handle signal `number` of `rank`, which arrived at the time `came_s`. After the first
        signal of the user, print a line. After the second signal, decide to stop the job at
        once."""
        who = f"{signal.Signals(number).name} on {self.ranks.name(rank)}"
        if self._acknowledged_s is None:
            self._acknowledged_s = now_s
            if not self.stopping:
                self.say(f"{who}: {_answer(number)}")
        elif came_s - self._acknowledged_s >= SECOND_SIGNAL_S and not self.stop_at_once:
            self.stop_at_once = True
            self.say(
                f"{who}, again: stopped at once; the same command resumes from the last checkpoint"
            )

    def _warn_of_silence(self, now_s: float) -> None:
        """Print one warning about each silent rank, and a line when the rank reports again."""
        silent = {rank for rank, seen in self.table.items() if self.ranks.silent(seen, now_s)}
        for rank in sorted(silent - self._called_silent.keys()):
            seen = self.table[rank]
            self.say(
                f"warning: {self.ranks.name(rank)} has not reported for {now_s - seen.at_s:.0f} s; "
                f"last in step {seen.report.step}: {describe(seen.report)}"
            )
        for rank in sorted(self._called_silent.keys() - silent):
            away_s = now_s - self._called_silent.pop(rank)
            self.say(f"{self.ranks.name(rank)} reports again after {away_s:.0f} s")
        for rank in silent:
            self._called_silent.setdefault(rank, self.table[rank].at_s)


def _answer(number: int) -> str:
    """Return the line that acknowledges the first signal to a rank."""
    if number == signal.SIGTERM and launcher_kills():
        return (
            "stops after this step, unless mpirun kills the ranks before: it waits a quarter of a "
            "second; `ptdmpi run` waits until the state is saved"
        )
    return "stops after this step; a second signal after 5 s stops it at once"
