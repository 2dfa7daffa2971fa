"""The time of a pipeline's step, in seconds. The time is computed from two things: the schedule
that the trainer executes, and the times of the stages.

`makespan_s` visits every op (a forward or backward of one microbatch in one stage) once, like
`simulate.execute`. To be fast enough for a search, `makespan_s` works on integers instead of `Op`
objects. All tensor-parallel and data-parallel ranks do the same work at the same time, so it is
enough to simulate one pipeline.
"""

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from ptdmpi.plan.schedule import orders as schedules
from ptdmpi.plan.schedule.ops import OP_KINDS, Op
from ptdmpi.plan.schedule.orders import Placement, Schedule
from ptdmpi.plan.schedule.simulate import Timeline, simulate

MOST_OPS = 100_000  # largest number of ops that are visited one by one


@dataclass(frozen=True)
class StageTimes:
    """The seconds of each stage's forward and backward, and of the messages that bring their
    inputs.

    `forward_in_s[s]` is the time of the message with the activation from stage s - 1 to stage s,
    and `backward_in_s[s]` is the time of the message with the gradient from stage s + 1 to stage s.
    Both times are 0 if `placed` puts the two stages on one rank. If `overlap` is True, a message is
    transferred while its sender and its receiver compute. If `overlap` is False, both ranks wait
    until the message has arrived. The time of the message is then added only to the receiver's op,
    because the sender is assumed to receive another message at the same time. If backwards are
    split, `weight_s` is the part of `backward_s` that is spent on the gradients of weights;
    otherwise `weight_s` is empty.
    """

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    forward_in_s: tuple[float, ...]
    backward_in_s: tuple[float, ...]
    overlap: bool
    placed: Placement
    weight_s: tuple[float, ...] = ()

    @cached_property
    def input_s(self) -> tuple[float, ...]:
        """Return the seconds that each stage spends on I (the gradients of its inputs) in a split
        backward."""
        parts = zip(self.backward_s, self.weight_s, strict=True)
        return tuple(whole_s - weight_s for whole_s, weight_s in parts)

    def duration_s(self, op: Op) -> float:
        """Return the seconds for which `op` occupies its rank. Unless messages overlap with
        computation, the seconds include the time of the message with the op's input."""
        own_s: float = getattr(self, op.row.cost)[op.stage] * op.row.share
        if self.overlap:
            return own_s
        return own_s + self._way_s(op)

    def travel_s(self, op: Op) -> float:
        """Return the seconds that the input of `op` takes to arrive from another rank, counted from
        the end of the op that produces the input. Return 0 if messages do not overlap with
        computation, because `duration_s` then includes the message."""
        if not self.overlap:
            return 0.0
        return self._way_s(op)

    def _way_s(self, op: Op) -> float:
        """Return the seconds of the message that brings the input of `op`: an activation from the
        previous stage, or a gradient from the next stage. Return 0 if there is no message."""
        if op.row.neighbour == 0:
            return 0.0
        if op.row.neighbour < 0:
            return self.forward_in_s[op.stage]
        return self.backward_in_s[op.stage]

    def busy_s(self, rank: int, microbatches: int) -> float:
        """Return the seconds that pipeline rank `rank` spends in the forwards and backwards of a
        step of `microbatches` microbatches."""
        own = self.placed.stages_of(rank)
        forward_s = sum(self.forward_s[stage] for stage in own)
        return microbatches * (forward_s + sum(self.backward_s[stage] for stage in own))

    def lower_bound_s(self, microbatches: int) -> float:
        """Return a lower bound of the pipeline's time, in seconds. The bound holds for every order
        of ops.

        For each rank, three times are added. The first is the time of the work that other ranks
        must do before this rank's first forward. The second is the time of all work of this rank.
        The third is the time of the work that other ranks must do after this rank's last backward.
        The bound is the maximum of these sums over the ranks. If backwards are split, the third
        time is 0: after the last I (gradient of the input), only weight gradients remain, which all
        ranks can compute at the same time.
        """
        bound = before = after = 0.0
        seen: set[int] = set()
        for stage in range(self.placed.stages):
            rank = self.placed.rank_of(stage)
            if rank not in seen:  # `stage` is the first one on this rank
                seen.add(rank)
                arrival, work = before, self.busy_s(rank, microbatches)
                if self.overlap:
                    arrival += self.forward_in_s[stage]
                else:
                    own = self.placed.stages_of(rank)
                    waits = sum(self.forward_in_s[s] + self.backward_in_s[s] for s in own)
                    work += microbatches * waits
                bound = max(bound, arrival + work + after)
            if len(seen) == self.placed.pipeline:
                break
            before += self.forward_s[stage] + self.forward_in_s[stage]
            if not self.weight_s:
                after += self.backward_s[stage] + self.backward_in_s[stage]
        return bound


@dataclass(frozen=True)
class _Numbered:
    """A schedule in which integers represent the ops. For each rank, `orders` has three integers
    per op. The first is the number of the op. The second is the number of the op on another stage
    that produces its input, or -1 if there is none. The third is an index in `ops`, which has one
    op for each kind of op and each stage, because all microbatches take the same time. `count` is
    the number of all ops."""

    orders: tuple[tuple[tuple[int, int, int], ...], ...]
    ops: tuple[Op, ...]
    count: int


def _scheduled(kind: str, placed: Placement, microbatches: int) -> Schedule:
    return schedules.build(kind, placed.pipeline, placed.virtual, microbatches)


@lru_cache(maxsize=64)
def _numbered(kind: str, placed: Placement, microbatches: int) -> _Numbered:
    schedule = _scheduled(kind, placed, microbatches)
    kinds = [letter for letter in OP_KINDS if letter in schedule.letters]
    ops = [Op(letter, stage, 0) for letter in kinds for stage in range(placed.stages)]
    slots = {op[:2]: slot for slot, op in enumerate(ops)}
    sources = [schedule.source(op) for op in ops]
    # for each kind and stage, find the source: the op on another stage that produces the input. An
    # op and its source have the same microbatch, so it is enough to look at microbatch 0
    first_of = [-1 if source is None else slots[source[:2]] for source in sources]
    orders = []
    for order in schedule.orders:
        numbers = []
        for letter, stage, microbatch in order:
            # the ops of one kind and stage have consecutive numbers, in the order of the
            # microbatches
            slot = slots[letter, stage]
            source = first_of[slot]
            number = -1 if source < 0 else source * microbatches + microbatch
            numbers.append((slot * microbatches + microbatch, number, slot))
        orders.append(tuple(numbers))
    return _Numbered(tuple(orders), tuple(ops), len(ops) * microbatches)


def makespan_s(kind: str, microbatches: int, times: StageTimes) -> float:
    """Return the seconds from the first forward to the last backward in the schedule `kind`.

    For a schedule with more than `MOST_OPS` ops, the time is extrapolated from fewer microbatches.
    In the pipeline's steady state, each further round of microbatches adds the same time, so the
    extrapolation is good.
    """
    p, stages = times.placed.pipeline, times.placed.stages
    # A round is p microbatches. `most` microbatches are whole rounds, and at least two, because the
    # steady state begins after the first round.
    most = p * max(2, MOST_OPS // (2 * stages) // p)
    if microbatches <= 2 * most:
        return _simulated_s(kind, microbatches, times)
    # Both simulations include the incomplete round of `rest` microbatches. The time of an
    # incomplete round cannot be extrapolated from whole rounds, because an interleaved schedule
    # pads the round.
    rest = microbatches % p
    shorter_s, longer_s = (_simulated_s(kind, count + rest, times) for count in (most, 2 * most))
    further = (microbatches - 2 * most - rest) / most
    return longer_s + further * (longer_s - shorter_s)


def _simulated_s(kind: str, microbatches: int, times: StageTimes) -> float:
    return _Pass(_numbered(kind, times.placed, microbatches), times).end_s(kind)


class _Pass:
    """A simulation that visits each op of a numbered schedule once.

    A rank waits only for ops on other ranks. An op also needs earlier ops of its own stage (for
    example, a backward needs its forward), but these come first in the rank's order anyway.
    """

    def __init__(self, numbered: _Numbered, times: StageTimes) -> None:
        self.orders = numbered.orders
        self.durations = [times.duration_s(op) for op in numbered.ops]
        self.travels = [times.travel_s(op) for op in numbered.ops]
        self.ends: list[float | None] = [None] * numbered.count
        self.clocks = [0.0] * len(self.orders)
        self.positions = [0] * len(self.orders)
        # number of an op -> the rank that waits for this op
        self.waiting: dict[int, int] = {}
        self.runnable = list(range(len(self.orders)))

    def end_s(self, kind: str) -> float:
        """Return the time, in seconds, at which all ranks have run all their ops. Raises
        DeadlockError if ranks wait for each other in a circle; the message of the error names the
        schedule's `kind`."""
        while self.runnable:
            self._advance(self.runnable.pop())
        if self.waiting:
            raise schedules.DeadlockError(f"the ranks of schedule {kind} wait for each other")
        return max(self.clocks)

    def _advance(self, rank: int) -> None:
        """Run the ops of one rank until an op must wait for its input from another rank."""
        # Local names are faster than attributes, and a search spends most of its time in this loop.
        order, ends, waiting = self.orders[rank], self.ends, self.waiting
        durations, travels = self.durations, self.travels
        clock = self.clocks[rank]
        for position in range(self.positions[rank], len(order)):
            number, source, slot = order[position]
            if source >= 0:
                end = ends[source]
                if end is None:
                    waiting[source] = rank
                    self.positions[rank] = position
                    break
                arrival = end + travels[slot]
                if arrival > clock:
                    clock = arrival
            clock += durations[slot]
            ends[number] = clock
            if number in waiting:
                self.runnable.append(waiting.pop(number))
        self.clocks[rank] = clock


def timeline(kind: str, microbatches: int, times: StageTimes, title: str) -> Timeline:
    """Return a timeline with the start and the end of each op, for a picture of the step whose time
    `makespan_s` returns."""
    return replace(simulate(_scheduled(kind, times.placed, microbatches), times), title=title)
