"""What a pipeline rank holds at once: the orders of a schedule, walked.

Whoever needs the most microbatches in flight asks here, so that warm-up, steady state and
cool-down stay the business of `orders` alone.
"""

from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

from ptdmpi.plan.schedule.orders import BACKWARD, KINDS

# In steady state within so many rounds of the pipeline; from there on ever the same, or, where all
# microbatches are kept, one round more holds p more of each.
ROUNDS = 3


class Moment(NamedTuple):
    """While the chunk number `running` of a rank runs a backward: the microbatches that each of its
    chunks, by ascending stage, holds; its own is among them. -1: nothing runs."""

    running: int
    held: tuple[int, ...]


@lru_cache(maxsize=16384)
def fullest(
    kind: str, pipeline: int, virtual: int, microbatches: int, rank: int
) -> tuple[Moment, ...]:
    """The moments of a step at which the rank may hold most: no other one holds more of each chunk.

    A rank nearer to the first stage holds no less at any moment of its order than one behind it.
    """
    shorter = ROUNDS * pipeline + microbatches % pipeline
    if microbatches <= shorter + pipeline:
        return _walked(kind, pipeline, virtual, microbatches, rank)
    first = _walked(kind, pipeline, virtual, shorter, rank)
    second = _walked(kind, pipeline, virtual, shorter + pipeline, rank)
    rounds = (microbatches - shorter) // pipeline
    return tuple(
        Moment(
            one.running,
            tuple(a + rounds * (b - a) for a, b in zip(one.held, more.held, strict=True)),
        )
        for one, more in zip(first, second, strict=True)
    )


def _walked(
    kind: str, pipeline: int, virtual: int, microbatches: int, rank: int
) -> tuple[Moment, ...]:
    order = list(KINDS[kind](pipeline, virtual, microbatches, rank))
    chunk_of = {stage: chunk for chunk, stage in enumerate(sorted({op.stage for op in order}))}
    held = [0] * len(chunk_of)
    seen: dict[int, set[tuple[int, ...]]] = {}
    for op in order:
        chunk = chunk_of[op.stage]
        if op.kind == BACKWARD:
            seen.setdefault(chunk, set()).add(tuple(held))
            held[chunk] -= 1
        else:
            held[chunk] += 1
    if not seen:
        return (Moment(-1, (1,) * len(held)),)  # nothing is kept: each is gone with its forward
    return tuple(
        Moment(running, state) for running in sorted(seen) for state in _undominated(seen[running])
    )


def _undominated(states: Iterable[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Those that no other one equals or exceeds in every chunk, ascending."""
    kept: list[tuple[int, ...]] = []
    for state in sorted(states, key=sum, reverse=True):
        if not any(all(a <= b for a, b in zip(state, other, strict=True)) for other in kept):
            kept.append(state)
    return sorted(kept)
