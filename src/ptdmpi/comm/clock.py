"""Clocks that measure a rank's work: the host's clock, and a device's, which uses its events.

A call that hands work to a device returns before the work has run, so the host's time before and
after the call says nothing about the work. Therefore a clock makes marks. A mark has a place in the
order of the device's work, and its time is known when the work before it is done. A mark of the
host is done when it is made.
"""

import time
from collections import deque
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ptdmpi.comm.queues import belong_to


class Mark(Protocol):
    """A moment in the order of a device's work, such as a CUDA event."""

    def done(self) -> bool:
        """Return True if the work before it is done. Never waits; any thread may ask."""

    def at_s(self) -> float:
        """Return the time of the mark, in seconds of `time.perf_counter`. The mark must be done."""


class Clock(Protocol):
    """A maker of marks on one device."""

    def mark(self) -> Mark:
        """Return a mark of now, after all work that was handed over so far."""

    def settle(self) -> None:
        """Wait for the device, so that all marks so far are done, and align the device's clock with
        the host's. It is called once in a step, where the host must wait anyway; marks never make
        it wait."""

    def asked_from_here(self) -> None:
        """Prepare the calling thread for queries of marks."""


class HostMark(float):
    """A mark of the host's clock: its seconds."""

    __slots__ = ()

    def done(self) -> bool:
        """Return True: the host's own work is done when the mark is made."""
        return True

    def at_s(self) -> float:
        """Return the time of the mark in seconds."""
        return float(self)


class HostClock:
    """The clock of the host. Its work is done when a call returns, so a mark is the present
    time."""

    def mark(self) -> Mark:
        """Return a mark of now."""
        return HostMark(time.perf_counter())

    def settle(self) -> None:
        """Do nothing: the host's marks are always done."""

    asked_from_here = settle


HOST = HostClock()


@dataclass(frozen=True)
class _Anchor:
    """A moment on both clocks: an event that the device has passed, and the host's time then."""

    event: Any
    at_s: float


@dataclass(frozen=True)
class _DeviceMark:
    event: Any
    anchor: _Anchor

    def done(self) -> bool:
        """Return True if the device has passed the mark."""
        return bool(self.event.query())

    def at_s(self) -> float:
        """Return the time at which the device passed the mark, in seconds."""
        return self.anchor.at_s + self.anchor.event.elapsed_time(self.event) / 1e3


class DeviceClock:
    """The clock of a device. Marks are events in the device's current queue. Their times are
    measured from the moment at which the host last waited for the device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module = torch.get_device_module(device)
        self.settle()

    def mark(self) -> Mark:
        """Record an event after all work that the device has received so far."""
        return _DeviceMark(self._event(), self._anchor)

    def settle(self) -> None:
        """Wait for the device."""
        event = self._event()
        event.synchronize()
        # take the time immediately: any delay is an error of the clock
        self._anchor = _Anchor(event, time.perf_counter())

    def asked_from_here(self) -> None:
        """Prepare the calling thread for queries of this device."""
        # a new thread uses the first GPU of the process. A query of another GPU's event would then
        # create a context of half a GB on that first GPU, where another rank works
        belong_to(self._device)

    def _event(self) -> Any:
        event = self._module.Event(enable_timing=True)
        event.record(self._module.current_stream(self._device))
        return event


def clock_of(device: torch.device) -> Clock:
    """Return the clock for computations on a device."""
    return HOST if device.type == "cpu" else DeviceClock(device)


class Total:
    """A sum of the seconds between pairs of marks, each added as soon as its marks are done."""

    def __init__(self) -> None:
        self._done_s = 0.0
        self._open: deque[tuple[Mark, Mark]] = deque()

    def add(self, begin: Mark, end: Mark) -> None:
        """Add a pair. Earlier pairs that are done are summed here, so that few are ever kept."""
        self._open.append((begin, end))
        self._add_done()

    @property
    def seconds(self) -> float:
        """Return the seconds between all pairs of marks that are done by now."""
        self._add_done()
        return self._done_s

    def _add_done(self) -> None:
        # a device works in order: if a mark is not done, no later one is
        while self._open and self._open[0][1].done():
            begin, end = self._open.popleft()
            self._done_s += end.at_s() - begin.at_s()
