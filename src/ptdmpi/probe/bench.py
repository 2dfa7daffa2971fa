"""Timing on all ranks at once, and checking what came out."""

import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ptdmpi.comm.communicator import Communicator
from ptdmpi.terminal.progress import SOON_S, progress
from ptdmpi.terminal.say import note

TRIALS = 5
TRIAL_S = 2e-3  # quick work is repeated until a trial takes this long
MOST_REPEATS = 200


class ProbeError(Exception):
    """A kernel or a message gave a wrong result."""


class Bench:
    """One rank of the measurement; every rank ends with the same numbers.

    `found` collects what is told at the end: (name, value in words). `clock` times a rank's own
    work: of a single thread that has a core to itself it is the thread's CPU time, in which
    whatever else runs on the machine does not count.
    """

    def __init__(self, everyone: Communicator, device: torch.device, local_ranks: int) -> None:
        self.everyone, self.device = everyone, device
        own_core = local_ranks <= len(os.sched_getaffinity(0))
        single = device.type == "cpu" and torch.get_num_threads() == 1
        self.clock = time.thread_time if own_core and single else time.perf_counter
        self.found: list[tuple[str, str]] = []
        self.advance: Callable[[float], object] = lambda more: None

    @contextmanager
    def phase(self, what: str, measurements: int) -> Iterator[None]:
        """Say what is measured, and while it lasts, how many of its measurements are done."""
        note(f"probe: {what}")
        with progress(f"probe: {what}", measurements, "measurement", SOON_S) as self.advance:
            yield

    def note(self, name: str, value: str) -> None:
        self.found.append((name, value))

    def median(self, value: float) -> float:
        """The median over all ranks."""
        return statistics.median(self.everyone.all_gather_object(value))

    def work_s(self, work: Callable[[], Any]) -> float:
        """Time of `work`, which sends nothing, on this rank while all ranks do it: the median over
        the ranks of the trials' least, for whatever else runs on the machine only adds time."""
        return self._least_s(work, self.clock)

    def message_s(self, work: Callable[[], Any]) -> float:
        """The same of messages, whose time passes in waiting, too."""
        return self._least_s(work, time.perf_counter)

    def _least_s(self, work: Callable[[], Any], clock: Callable[[], float]) -> float:
        work()
        repeats = self._repeats(self._once(work, 1, clock))
        least_s = self.median(min(self._once(work, repeats, clock) for _ in range(TRIALS)))
        self.advance(1)
        return least_s

    def _repeats(self, seconds: float) -> int:
        """The same on all ranks, for `work` may be a collective."""
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
        """Wait for what the device has been given."""
        if self.device.type != "cpu":
            torch.get_device_module(self.device).synchronize(self.device)

    def check(self, right: bool, what: str) -> None:
        """Raises ProbeError on every rank if `right` is false on any."""
        wrong = [str(i) for i, ok in enumerate(self.everyone.all_gather_object(right)) if not ok]
        if wrong:
            raise ProbeError(f"{what} is wrong on ranks {', '.join(wrong)}")
