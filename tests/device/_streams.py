"""Queues and events of a pretended device, which runs behind the host until it is waited for."""

import contextlib
import math
import time
import types
from collections.abc import Iterator
from typing import Any

import torch

from tests.device._seen import SEEN, where_now


class Event:
    """An event that runs behind: it is reached when the device is waited for, and not before."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False) -> None:
        self.timed, self.at_s = enable_timing, math.nan
        self.reached = True  # as an event of CUDA that was never recorded

    def record(self, stream: "Stream | None" = None) -> None:
        """Put the event into the queue of events that the device has not reached."""
        self.reached, self.at_s = False, time.perf_counter()
        MODULE.waiting.append(self)

    def query(self) -> bool:
        """Return True if the device has reached the event."""
        return self.reached

    def synchronize(self) -> None:
        """Wait for the device, and note the wait."""
        if not self.reached:
            SEEN.waits.append(f"event at {where_now()}")
        MODULE.catch_up()

    def wait(self, stream: "Stream | None" = None) -> None:
        """Note that a stream waits for the event."""
        MODULE.stream_waits.append(where_now())

    def elapsed_time(self, end: "Event") -> float:
        """Return the milliseconds to `end`; fail if either was not waited for."""
        assert self.timed and end.timed, "an event without a time"
        assert self.reached and end.reached, "read before the device was waited for"
        return 1e3 * (end.at_s - self.at_s)


class Stream:
    """A queue of the device; here all work is done at once, in the order of the calls."""

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        self.priority = priority

    def wait_event(self, event: Event) -> None:
        """Note the wait."""
        MODULE.stream_waits.append(where_now())

    def wait_stream(self, stream: "Stream") -> None:
        """Note the wait."""
        MODULE.stream_waits.append(where_now())

    def record_event(self, event: Event | None = None) -> Event:
        """Record an event, a new one by default, and return it."""
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        """Wait for the device, and note the wait."""
        SEEN.waits.append(f"stream at {where_now()}")
        MODULE.catch_up()


class _Module:
    """What `torch.pretend` is."""

    Event, Stream = Event, Stream

    def __init__(self) -> None:
        self.waiting: list[Event] = []
        self.stream_waits: list[str] = []
        self._main = Stream()
        self.uuid, self.total_memory = "pretended", 1 << 37
        self.outside_bytes = 0  # of contexts and other processes

    def catch_up(self) -> None:
        for event in self.waiting:
            event.reached = True
        self.waiting = []

    def synchronize(self, device: Any = None) -> None:
        SEEN.waits.append(f"synchronize at {where_now()}")
        self.catch_up()

    def current_stream(self, device: Any = None) -> Stream:
        return self._main

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        yield

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return True

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 1

    def set_device(self, device: Any) -> None:
        pass

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        pass

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def get_device_name(self, device: Any = None) -> str:
        return "a pretended device"

    def get_device_properties(self, device: Any = None) -> types.SimpleNamespace:
        return types.SimpleNamespace(uuid=self.uuid, total_memory=self.total_memory)

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        return self.total_memory - self.outside_bytes - SEEN.held_bytes, self.total_memory

    def memory_reserved(self, device: Any = None) -> int:
        return SEEN.held_bytes

    def get_device_capability(self, device: Any = None) -> tuple[int, int]:
        return (0, 1)

    def empty_cache(self) -> None:
        pass

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        SEEN.peak_bytes = SEEN.held_bytes

    def max_memory_allocated(self, device: Any = None) -> int:
        return SEEN.peak_bytes


MODULE = _Module()
