"""Timing of kernels and messages on all ranks at the same time. If a kernel or a message gives a
wrong result, the timing ends with `ProbeError`."""

import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ptdmpi.base.progress import SOON_S, progress
from ptdmpi.base.say import note
from ptdmpi.comm.communicator import Communicator
from ptdmpi.model.kernels import USUAL

TRIALS = 5
# the duration of a trial in seconds; if the work is shorter, the trial repeats it
TRIAL_S = 2e-3
MOST_REPEATS = 200


class ProbeError(Exception):
    """The error that is raised if a kernel or a message gave a wrong result."""


class Bench:
    """The stopwatch of one rank. Every rank gets the same measured times.

    `findings` collects the results that are printed at the end, as (name, text of the value).
    `clock` returns the time in seconds; it times work without messages. If a rank has a single
    thread and its own core, `clock` is the CPU time of the thread, which other programs on the
    machine do not change. `kernels` are the kernels that are measured. `over` computes one result
    from the values of all ranks, by default their median.
    """

    def __init__(self, everyone: Communicator, device: torch.device, local_ranks: int) -> None:
        """Prepare the stopwatch. `everyone` is the communicator of all ranks that measure, `device`
        is the device of this rank, and `local_ranks` is the number of ranks on its node."""
        self.everyone = everyone
        self.device = device
        own_core = local_ranks <= len(os.sched_getaffinity(0))
        single = device.type == "cpu" and torch.get_num_threads() == 1
        self.clock = time.perf_counter
        if own_core and single:
            self.clock = time.thread_time
        self.findings: list[tuple[str, str]] = []
        self.kernels = USUAL
        self.over: Callable[[Sequence[float]], float] = statistics.median
        self.advance: Callable[[float], object] = lambda more: None

    @contextmanager
    def phase(self, what: str, measurements: int) -> Iterator[None]:
        """Return a context that prints what is measured inside it (`what`), and shows the progress.
        `measurements` is the number of measurements in the context."""
        note(f"probe: {what}")
        with progress(f"probe: {what}", measurements, "measurement", SOON_S) as self.advance:
            yield

    def note(self, name: str, value: str) -> None:
        """Store the text `value` of the measured result `name`. All results are printed at the
        end."""
        self.findings.append((name, value))

    def agreed(self, value: float) -> float:
        """Return the result of `over` for the values of all ranks; by default it is the median.
        Every rank calls this method."""
        return self.over(self.everyone.all_gather_object(value))

    def work_s(self, work: Callable[[], Any]) -> float:
        """Return the seconds of `work`, which sends no messages, while all ranks do it at the same
        time.

        Each rank takes the time of its fastest trial, because other programs on the machine only
        add time. The result is the median of these times over all ranks, or another function of
        them (`over`).
        """
        return self._least_s(work, self.clock)

    def message_s(self, work: Callable[[], Any]) -> float:
        """Return the seconds of `work`, which sends messages. The result is measured as in
        `work_s`, but includes the time in which a rank waits for other ranks."""
        return self._least_s(work, time.perf_counter)

    def _least_s(self, work: Callable[[], Any], clock: Callable[[], float]) -> float:
        work()
        repeats = self._repeats(self._once(work, 1, clock))
        least_s = self.agreed(min(self._once(work, repeats, clock) for _ in range(TRIALS)))
        self.advance(1)
        return least_s

    def _repeats(self, seconds: float) -> int:
        """Return how often one trial repeats work that takes `seconds` seconds on this rank. The
        result is the same on all ranks, because the work may be a collective, which all ranks must
        repeat equally often.
        """
        most = max(self.everyone.all_gather_object(seconds))
        return max(1, min(MOST_REPEATS, round(TRIAL_S / most)))

    def _once(self, work: Callable[[], Any], repeats: int, clock: Callable[[], float]) -> float:
        self.everyone.barrier()
        self.finish()
        start = clock()
        for _ in range(repeats):
            work()
        self.finish()
        return (clock() - start) / repeats

    def finish(self) -> None:
        """Wait until the device has finished all work that was started on it."""
        if self.device.type != "cpu":
            torch.get_device_module(self.device).synchronize(self.device)

    def check(self, right: bool, what: str) -> None:
        """Raise ProbeError on every rank if `right` is False on any rank. The message says that
        `what` is wrong."""
        results = self.everyone.all_gather_object(right)
        wrong = [str(rank) for rank, is_right in enumerate(results) if not is_right]
        if wrong:
            raise ProbeError(f"{what} is wrong on ranks {', '.join(wrong)}")
