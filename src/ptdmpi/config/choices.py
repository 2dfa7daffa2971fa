"""The legal values of some keys of a configuration, and properties of these values (for example,
which pipeline schedules split the backward)."""

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
# Schedule -> the number of model chunks per rank that the schedule requires.
CHUNKS = {"1f1b": 1, "zb-h1": 1, "zb-v": 2}
# Schedules that split the backward into two ops: the second, later op computes the gradients of
# weights.
SPLITTING = ("zb-h1", "zb-v")


def default_schedule(virtual: int) -> str:
    """Return the default pipeline schedule: "1f1b" for one model chunk per rank, otherwise
    "interleaved".
    """
    return "1f1b" if virtual == 1 else "interleaved"


def usable_schedules(virtual: int) -> str:
    """Return the pipeline schedules that accept `virtual` model chunks per rank, as text for an
    error message. The default schedule for this number of chunks comes first."""
    usable = [name for name in SCHEDULES if CHUNKS.get(name, virtual) == virtual]
    usable.sort(key=lambda name: name != default_schedule(virtual))
    return " or ".join(f'"{name}"' for name in usable)
