"""Clocks that measure how long a rank's work takes. For a GPU or another device, the events of the
device measure the time.

A call that gives work to a device returns before the device has done the work, so the host's time
before and after the call does not measure the work. A clock therefore makes marks, such as CUDA
events. Each mark has a position in the order of the device's work. A mark is done when the device
has done all work before the mark; only then can the time of the mark be read. A mark of the host is
done as soon as it is made.
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
        """Return True if the work before the mark is done. This method never waits, and any thread
        may call it."""

    def at_s(self) -> float:
        """Return the time of the mark in seconds, on the clock of `time.perf_counter`. Call this
        method only after the device has passed the mark."""


class Clock(Protocol):
    """An object that makes marks in the work of one device."""

    def mark(self) -> Mark:
        """Return a new mark, which is done when all work issued so far is done."""

    def settle(self) -> None:
        """Wait for the device, so that all marks so far are done. Then align the device's clock
        with the host's clock. The trainer calls `settle` once per step, at a point where the host
        must wait for the device anyway."""

    def asked_from_here(self) -> None:
        """Prepare the calling thread, so that it can call the method `done` of this clock's
        marks."""


class HostMark(float):
    """A mark of the host's clock: the time in seconds."""

    __slots__ = ()

    def done(self) -> bool:
        """Return True, because the host's work before a mark is done when the mark is made."""
        return True

    def at_s(self) -> float:
        """Return the time of the mark in seconds."""
        return float(self)


class HostClock:
    """The clock of the host. The host's work is done when a call returns, so a mark is the present
    time."""

    def mark(self) -> Mark:
        """Return the present time as a mark."""
        return HostMark(time.perf_counter())

    def settle(self) -> None:
        """Do nothing, because marks of the host are always done."""

    asked_from_here = settle


HOST = HostClock()


@dataclass(frozen=True)
class _Anchor:
    """A moment whose time is known on the clocks of host and device: an event that the device has
    passed, and the time of this event on the host's clock."""

    event: Any
    at_s: float


@dataclass(frozen=True)
class _DeviceMark:
    """A mark in a device's stream: an event, and an earlier event (the anchor) whose time is
    known."""

    event: Any
    anchor: _Anchor

    def done(self) -> bool:
        """Return True if the device has passed the mark."""
        return bool(self.event.query())

    def at_s(self) -> float:
        """Return the time at which the device passed the mark, in seconds."""
        return self.anchor.at_s + self.anchor.event.elapsed_time(self.event) / 1e3


class DeviceClock:
    """The clock of a device. A mark is an event in the device's current stream. The time of a mark
    is a sum: the host's time when the host last waited for the device before the mark (`settle`),
    plus the time that the device measures from then to the mark."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module = torch.get_device_module(device)
        self.settle()

    def mark(self) -> Mark:
        """Record an event after all work that the device has received so far."""
        return _DeviceMark(self._event(), self._anchor)

    def settle(self) -> None:
        """Wait for the device. Then record the host's time at this moment, so that the times of
        later events can be converted to the host's clock."""
        event = self._event()
        event.synchronize()
        # read the host's clock immediately, because a delay would shift the times of all later
        # marks
        self._anchor = _Anchor(event, time.perf_counter())

    def asked_from_here(self) -> None:
        """Let the calling thread use this device, so that the thread can query the events of the
        device."""
        # CUDA lets a new thread use the first GPU that the process sees. If the thread queried an
        # event of another GPU, CUDA would create a context of half a GB on the first GPU, which
        # belongs to another rank.
        belong_to(self._device)

    def _event(self) -> Any:
        event = self._module.Event(enable_timing=True)
        event.record(self._module.current_stream(self._device))
        return event


def clock_of(device: torch.device) -> Clock:
    """Return the clock that measures work on a device."""
    return HOST if device.type == "cpu" else DeviceClock(device)


class Total:
    """A sum of durations. Each pair of marks adds the seconds between its two marks to the sum, as
    soon as the device has passed both marks."""

    def __init__(self) -> None:
        self._done_s = 0.0
        self._open: deque[tuple[Mark, Mark]] = deque()

    def add(self, begin: Mark, end: Mark) -> None:
        """Store a pair of marks. Then update the sum: add the durations of all stored pairs whose
        marks the device has passed, so that few pairs remain stored."""
        self._open.append((begin, end))
        self._add_done()

    @property
    def seconds(self) -> float:
        """Return the sum in seconds, over all pairs of marks that the device has passed by now."""
        self._add_done()
        return self._done_s

    def _add_done(self) -> None:
        # a device works in order: if one mark is not done, no later mark is done
        while self._open and self._open[0][1].done():
            begin, end = self._open.popleft()
            self._done_s += end.at_s() - begin.at_s()
