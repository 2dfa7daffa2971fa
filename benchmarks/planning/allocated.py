"""Bytes of tensors that a piece of work allocates on the host, counted by torch's profiler."""

import gc
from collections.abc import Callable

from torch.profiler import ProfilerActivity, profile


def measured(work: Callable[[], object]) -> tuple[int, int]:
    """Return the bytes that `work` leaves allocated, and the most that it had at once."""
    gc.collect()  # engines of earlier work have cycles, which must not be freed meanwhile
    gc.disable()
    try:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            work()
    finally:
        gc.enable()
    events = profiled.profiler.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    now = most = 0
    for _, size in changes:
        now += size
        most = max(most, now)
    return now, most
