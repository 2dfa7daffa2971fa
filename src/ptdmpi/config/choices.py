"""The names that keys of a configuration choose from, and the facts that a name alone
determines."""

from typing import Literal, get_args

ScheduleName = Literal["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"]
CodesName = Literal["int8", "int4", "uint4", "nf4"]
RecomputeMode = Literal["none", "selective", "full"]
OffloadName = Literal["none", "optimizer", "disk"]
ContextMethod = Literal["all_gather", "ulysses", "ring"]
SCHEDULES: tuple[str, ...] = get_args(ScheduleName)
RECOMPUTE_MODES: tuple[str, ...] = get_args(RecomputeMode)
OFFLOADS: tuple[str, ...] = get_args(OffloadName)
CONTEXT_METHODS: tuple[str, ...] = get_args(ContextMethod)
# Schedules that need a fixed number of chunks per rank -> this number.
CHUNKS = {"1f1b": 1, "zb-h1": 1, "zb-v": 2}
# Schedules that compute the gradients of weights later, in an op of their own.
SPLITTING = ("zb-h1", "zb-v")


def default_schedule(virtual: int) -> str:
    """Return the schedule used when none is named: 1f1b for one chunk per rank, else
    interleaved."""
    return "1f1b" if virtual == 1 else "interleaved"
