"""A count, by torch's profiler, of the bytes of tensors that a function allocates on the host."""

import gc
from collections.abc import Callable

from torch.profiler import ProfilerActivity, profile


def measured(work: Callable[[], object]) -> tuple[int, int]:
    """Call `work`. Return the bytes that remain allocated after the call, and the maximum number of
    bytes that were allocated at the same time."""
    gc.collect()  # free earlier engines, which contain reference cycles, now and not during `work`
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
