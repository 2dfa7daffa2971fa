"""The step of a pipeline in seconds: the schedule that the runner executes, with the stages' times.

`makespan_s` visits every op once, as `simulate.execute` does, on numbers in place of ops, so that a
search may ask it often. Tensor ranks and data ranks do the same at the same time: one pipeline
stands for all (symmetry).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from ptdmpi.plan.schedule import orders as schedules
from ptdmpi.plan.schedule.orders import FORWARD, Op
from ptdmpi.plan.schedule.simulate import Timeline, simulate

MOST_OPS = 100_000  # that are visited one by one, or twice as many


@dataclass(frozen=True)
class StageTimes:
    """Seconds of each stage's forward and backward, and of the messages into them.

    `forward_in_s[s]` is the way of the activation from stage s - 1 to stage s, `backward_in_s[s]`
    of the gradient from stage s + 1; 0 where both stand on one rank. With `overlap` a message
    travels while its ranks compute; else its receiver waits through all of it, and the sender,
    which receives at the same time, with it.
    """

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    forward_in_s: tuple[float, ...]
    backward_in_s: tuple[float, ...]
    overlap: bool

    def duration_s(self, op: Op) -> float:
        """How long the rank is taken by `op`, its input's way included unless they overlap."""
        if op.kind == FORWARD:
            own_s, way_s = self.forward_s[op.stage], self.forward_in_s[op.stage]
        else:
            own_s, way_s = self.backward_s[op.stage], self.backward_in_s[op.stage]
        return own_s if self.overlap else own_s + way_s

    def travel_s(self, op: Op) -> float:
        """From the end of the source of `op` to when `op` may start on another rank."""
        if not self.overlap:
            return 0.0
        return (self.forward_in_s if op.kind == FORWARD else self.backward_in_s)[op.stage]

    def busy_s(self, rank: int, pipeline: int, microbatches: int) -> float:
        """Time of a rank in its forwards and backwards."""
        own = slice(rank, None, pipeline)
        return microbatches * (sum(self.forward_s[own]) + sum(self.backward_s[own]))

    def lower_bound_s(self, pipeline: int, microbatches: int) -> float:
        """No order of work is faster: of every rank, what must happen before its first forward, all
        its own work, and what must happen after its last backward."""
        bound = before = after = 0.0
        way = 0.0 if self.overlap else 1.0
        for rank in range(pipeline):
            own = range(rank, len(self.forward_s), pipeline)
            waits = sum(self.forward_in_s[s] + self.backward_in_s[s] for s in own)
            work = self.busy_s(rank, pipeline, microbatches) + way * microbatches * waits
            before += (1.0 - way) * self.forward_in_s[rank]
            bound = max(bound, before + work + after)
            before += self.forward_s[rank] + way * self.forward_in_s[rank]
            after += self.backward_s[rank] + self.backward_in_s[rank]
        return bound


@lru_cache(maxsize=64)
def _orders(
    kind: str, pipeline: int, virtual: int, microbatches: int
) -> tuple[tuple[tuple[int, int, int], ...], ...]:
    """Each rank's order as (number of the op, number of its source or -1, 2 stage + is
    backward)."""
    stages, generate = pipeline * virtual, schedules.KINDS[kind]
    backwards = stages * microbatches
    orders = []
    for rank in range(pipeline):
        order = []
        for op_kind, stage, microbatch in generate(pipeline, virtual, microbatches, rank):
            number = stage * microbatches + microbatch
            if op_kind == FORWARD:
                source = number - microbatches if stage else -1
                order.append((number, source, 2 * stage))
            else:
                source = backwards + number + microbatches if stage + 1 < stages else -1
                order.append((backwards + number, source, 2 * stage + 1))
        orders.append(tuple(order))
    return tuple(orders)


def makespan_s(
    kind: str, pipeline: int, virtual: int, microbatches: int, times: StageTimes
) -> float:
    """From the first forward to the last backward. Beyond `MOST_OPS`, where the pipeline has long
    been in step with itself, each further microbatch takes as long as those before."""
    # whole rounds of the pipeline; it is in step with itself after the first
    most = pipeline * max(2, MOST_OPS // (2 * pipeline * virtual) // pipeline)
    if microbatches <= 2 * most:
        return _simulated_s(kind, pipeline, virtual, microbatches, times)
    rest = microbatches % pipeline
    shorter_s, longer_s = (
        _simulated_s(kind, pipeline, virtual, count + rest, times) for count in (most, 2 * most)
    )
    further = (microbatches - 2 * most - rest) / most
    return longer_s + further * (longer_s - shorter_s)


def _simulated_s(
    kind: str, pipeline: int, virtual: int, microbatches: int, times: StageTimes
) -> float:
    """A backward's own forward stands before it in its rank's order, so only sources are waited
    for."""
    stages = pipeline * virtual
    ops = [Op(k, stage, 0) for stage in range(stages) for k in (FORWARD, schedules.BACKWARD)]
    durations = [times.duration_s(op) for op in ops]
    travels = [times.travel_s(op) for op in ops]
    orders = _orders(kind, pipeline, virtual, microbatches)
    ends: list[float | None] = [None] * (2 * stages * microbatches)
    clocks, positions = [0.0] * pipeline, [0] * pipeline
    waiting: dict[int, int] = {}
    runnable = list(range(pipeline))
    while runnable:
        rank = runnable.pop()
        clocks[rank], positions[rank], missing = _advance(
            (orders[rank], positions[rank], clocks[rank]),
            (durations, travels),
            (ends, waiting, runnable),
        )
        if missing >= 0:
            waiting[missing] = rank
    if waiting:
        raise schedules.DeadlockError(f"schedule {kind} waits for itself")
    return max(clocks)


def _advance(
    place: tuple[Sequence[tuple[int, int, int]], int, float],
    costs: tuple[list[float], list[float]],
    state: tuple[list[float | None], dict[int, int], list[int]],
) -> tuple[float, int, int]:
    """One rank as far as it gets: (its clock, its position, the op it waits for or -1)."""
    order, position, clock = place
    (durations, travels), (ends, waiting, runnable) = costs, state
    while position < len(order):
        number, source, slot = order[position]
        if source >= 0:
            end = ends[source]
            if end is None:
                return clock, position, source
            arrival = end + travels[slot]
            if arrival > clock:
                clock = arrival
        clock += durations[slot]
        ends[number] = clock
        position += 1
        if number in waiting:
            runnable.append(waiting.pop(number))
    return clock, position, -1


def timeline(
    kind: str, pipeline: int, virtual: int, microbatches: int, times: StageTimes, title: str
) -> Timeline:
    """The same, op by op, to be drawn."""
    planned = simulate(schedules.build(kind, pipeline, virtual, microbatches), times)
    return replace(planned, title=title)
