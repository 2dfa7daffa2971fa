"""Timing on all ranks at once, and checking what came out."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from ptdmpi.comm.communicator import Communicator

TRIALS = 5
TRIAL_S = 2e-3  # quick work is repeated until a trial takes this long
MOST_REPEATS = 200


class ProbeError(Exception):
    """A kernel or a message gave a wrong result."""


class Bench:
    """One rank of the measurement; every rank ends with the same numbers.

    `found` collects what is told at the end: (name, value in words).
    """

    def __init__(self, everyone: Communicator, device: torch.device) -> None:
        self.everyone, self.device = everyone, device
        self.found: list[tuple[str, str]] = []

    def note(self, name: str, value: str) -> None:
        self.found.append((name, value))

    def median(self, value: float) -> float:
        """Of all ranks."""
        return statistics.median(self.everyone.all_gather_object(value))

    def time_s(self, work: Callable[[], Any]) -> float:
        """Time of `work` on this rank while all ranks do it: median of the trials' least, over the
        ranks. Whatever else runs on the machine only adds time."""
        work()
        repeats = self._repeats(self._once(work, 1))
        return self.median(min(self._once(work, repeats) for _ in range(TRIALS)))

    def _repeats(self, seconds: float) -> int:
        """The same on all ranks, for `work` may be a collective."""
        most = max(self.everyone.all_gather_object(seconds))
        return max(1, min(MOST_REPEATS, round(TRIAL_S / most)))

    def _once(self, work: Callable[[], Any], repeats: int) -> float:
        self.everyone.barrier()
        self._wait()
        start = time.perf_counter()
        for _ in range(repeats):
            work()
        self._wait()
        return (time.perf_counter() - start) / repeats

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def check(self, right: bool, what: str) -> None:
        """Raises ProbeError on every rank if `right` is false on any."""
        wrong = [str(i) for i, ok in enumerate(self.everyone.all_gather_object(right)) if not ok]
        if wrong:
            raise ProbeError(f"{what} is wrong on ranks {', '.join(wrong)}")
