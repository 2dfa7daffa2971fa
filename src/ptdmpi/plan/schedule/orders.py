"""Pipeline schedules as data: the order of ops (forwards and backwards of microbatches) on each
pipeline rank, and the rank of each stage.

A schedule holds no times, idle slots or messages. The modules `simulate` and `program` derive
times, idle slots and messages from the orders. A generator yields the order of one rank. The table
`KINDS` lists the generators, each with its placement of stages on ranks. The order of ops (warm-up,
steady state and cool-down) and the rank of each stage are defined only in this file and in
`zero_bubble`.

In every schedule, each stage runs both its forwards and its backwards in ascending order of the
microbatches. Gradients are therefore summed in the same order in every schedule and layout.
"""

import difflib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from ptdmpi.config import InputError
from ptdmpi.config.legality import chunk_rule
from ptdmpi.plan.schedule.held import most_held
from ptdmpi.plan.schedule.ops import ACTIVATIONS, BACKWARD, FORWARD, OP_KINDS, Op
from ptdmpi.plan.schedule.zero_bubble import on_a_v, zb_h1, zb_v


class DeadlockError(Exception):
    """A deadlock, in which all unfinished ranks wait for each other. The error message names the
    action at which each of these ranks waits."""


@dataclass(frozen=True)
class Placement:
    """The placement of stages on pipeline ranks: `ranks[stage]` is the rank that has the stage."""

    ranks: tuple[int, ...]

    def __hash__(self) -> int:
        return self._hash  # computed only once, because a search reads this hash very often

    @cached_property
    def _hash(self) -> int:
        return hash(self.ranks)

    @property
    def stages(self) -> int:
        """Return the number of stages."""
        return len(self.ranks)

    @cached_property
    def pipeline(self) -> int:
        """Return the number of pipeline ranks."""
        return max(self.ranks) + 1

    @property
    def virtual(self) -> int:
        """Return the number of stages per rank, which is the same on every rank."""
        return self.stages // self.pipeline

    @cached_property
    def _of_rank(self) -> tuple[tuple[int, ...], ...]:
        own: list[list[int]] = [[] for _ in range(self.pipeline)]
        for stage, rank in enumerate(self.ranks):
            own[rank].append(stage)
        return tuple(map(tuple, own))

    def rank_of(self, stage: int) -> int:
        """Return the pipeline rank that holds `stage`."""
        return self.ranks[stage]

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages (chunks of the model) that pipeline rank `rank` holds, ascending."""
        return self._of_rank[rank]


@dataclass(frozen=True)
class Schedule:
    """The order of computation of each pipeline rank: `orders[rank]` is a sequence of ops.

    `pipeline` (p) is the number of ranks, `virtual` (v) the number of chunks per rank, and
    `microbatches` (m) the number of microbatches. The model is cut into p x v stages, and
    `placement` has the rank of each stage.
    """

    kind: str
    placement: Placement
    microbatches: int
    orders: tuple[tuple[Op, ...], ...]

    @property
    def pipeline(self) -> int:
        """Return the number of pipeline ranks."""
        return len(self.orders)

    @property
    def virtual(self) -> int:
        """Return the number of chunks of the model on each rank."""
        return self.placement.virtual

    @property
    def stages(self) -> int:
        """Return the number of stages."""
        return self.placement.stages

    @cached_property
    def letters(self) -> frozenset[str]:
        """Return the letters of the kinds of ops that the schedule has, such as F and B."""
        return frozenset(op.kind for order in self.orders for op in order)

    def rank_of(self, stage: int) -> int:
        """Return the pipeline rank that holds `stage`."""
        return self.placement.rank_of(stage)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages that pipeline rank `rank` holds, ascending."""
        return self.placement.stages_of(rank)

    def source(self, op: Op) -> Op | None:
        """Return the op of a neighbouring stage whose output is the input of `op`. Return None if
        there is no such op."""
        neighbour = op.row.neighbour
        stage = op.stage + neighbour
        if neighbour == 0 or not 0 <= stage < self.stages:
            return None
        return Op(op.kind, stage, op.microbatch)

    def needs(self, op: Op) -> tuple[Op, ...]:
        """Return the ops that must have ended before `op` starts.

        The result has the op that produces the input of `op`, and, for the same stage and
        microbatch, the ops whose kinds are in `OpKind.after`. For example, a backward needs its
        forward.
        """
        source = self.source(op)
        own = (Op(kind, op.stage, op.microbatch) for kind in op.row.after if kind in self.letters)
        return (*own,) if source is None else (source, *own)

    def completes_gradients(self, op: Op) -> bool:
        """Return True if `op` adds to the gradients of its stage, and no later op adds another
        contribution of the same microbatch."""
        adding = [kind for kind in self.letters if OP_KINDS[kind].gradients]
        # If several kinds of ops add gradients, `op` is the last of them if its `after` names all
        # others.
        return op.row.gradients and all(kind in (op.kind, *op.row.after) for kind in adding)

    def peak_activations(self) -> tuple[int, ...]:
        """Return, for each rank, the largest number of forwards that are in flight at the same
        time. A forward is the computation of one stage on one microbatch.

        A forward is in flight from its start to the end of its backward, or to its own end if the
        schedule has no backwards.
        """
        return tuple(
            int(most_held(order, lambda inventory, stage: inventory == ACTIVATIONS))
            for order in self.orders
        )

    def bubble_closed_form(self, forward_s: float, input_s: float, weight_s: float) -> float:
        """Return the bubble, which is idle time divided by ideal time, from a closed form. The
        closed form assumes that ranks are idle only while the pipeline fills and drains.

        The arguments are the times of a chunk's forward and of the two parts of its backward. The
        property `closed_form` has the formula as text. With p ranks, v chunks per rank and m
        microbatches, the bubble (p - 1) / (v m) is exact for 1f1b, and for interleaved if p divides
        m (Narayanan et al. 2021, sections 2.2.1 and 2.2.2). The idle times of the zero-bubble
        schedules are explained in the module `zero_bubble`.
        """
        idle_s = KINDS[self.kind].bubble.idle_s(forward_s, input_s, weight_s)
        busy_s = self.virtual * self.microbatches * (forward_s + input_s + weight_s)
        return (self.pipeline - 1) * idle_s / busy_s

    @property
    def closed_form(self) -> str:
        """Return the formula of `bubble_closed_form` as text."""
        return KINDS[self.kind].bubble.text


def gpipe(rank: int, chunks: Sequence[int], pipeline: int, microbatches: int) -> Iterator[Op]:
    """Yield all forwards, then all backwards (GPipe: Huang et al. 2019, arXiv 1811.06965).

    If a rank has several chunks, each chunk runs all microbatches before the next chunk starts
    (breadth first: Lamy-Poirier 2023, arXiv 2211.05953). Backwards run in ascending order of the
    microbatches, so that gradients are summed in the same order in every schedule. (The paper has
    descending order.)
    """
    yield from (Op(FORWARD, stage, i) for stage in chunks for i in range(microbatches))
    # the backwards of the last chunk come first, because the other chunks need the gradients that
    # they send
    yield from (Op(BACKWARD, stage, i) for stage in reversed(chunks) for i in range(microbatches))


def one_forward_one_backward(
    rank: int, chunks: Sequence[int], pipeline: int, microbatches: int
) -> Iterator[Op]:
    """Yield the ops of 1F1B, also called PipeDream-Flush (Narayanan et al. 2021, section 2.2.1,
    Figure 4, top).

    Rank r of p ranks has one chunk and starts with p - r - 1 forwards, one for each rank after it.
    Then forwards and backwards alternate, so at most p - r forwards are in flight.
    """
    (stage,) = chunks
    forwards = [Op(FORWARD, stage, i) for i in range(microbatches)]
    backwards = [Op(BACKWARD, stage, i) for i in range(microbatches)]
    yield from _alternate(forwards, backwards, _warm_up(rank, pipeline, 1))


def interleaved(rank: int, chunks: Sequence[int], pipeline: int, microbatches: int) -> Iterator[Op]:
    """Yield the ops of interleaved 1F1B for any number of microbatches.

    The order is from Narayanan et al. 2021, section 2.2.2, Figure 4 (bottom). There are p ranks
    with v chunks each, and m microbatches in groups of p. A rank runs a group of microbatches
    through one of its chunks, and then the same group through its next chunk. Rank r begins with 2
    (p - r - 1) + (v - 1) p forwards (warm-up). With one chunk per rank this schedule is 1F1B.

    In the order of the paper, p must divide m. If p does not divide m, the order for m rounded up
    to a multiple of p is built, and the ops of the additional (phantom) microbatches are omitted.
    An op needs only ops of its own microbatch, so the remaining ops never wait for an omitted op,
    and the shorter order has no deadlock. In the shorter order, an op waits only for ops for which
    it also waits in the full order. Therefore the makespan is at most the makespan for m rounded
    up.
    """
    if len(chunks) == 1:
        yield from one_forward_one_backward(rank, chunks, pipeline, microbatches)
        return
    groups = [range(i, i + pipeline) for i in range(0, microbatches, pipeline)]
    forwards = [Op(FORWARD, s, i) for group in groups for s in chunks for i in group]
    backwards = [Op(BACKWARD, s, i) for group in groups for s in reversed(chunks) for i in group]
    padded = _alternate(forwards, backwards, _warm_up(rank, pipeline, len(chunks)))
    yield from (op for op in padded if op.microbatch < microbatches)


def forward_only(
    rank: int, chunks: Sequence[int], pipeline: int, microbatches: int
) -> Iterator[Op]:
    """Yield only the forwards of the interleaved schedule, for validation.

    The order runs one group of microbatches after the other, and within a group one chunk after the
    other, so every forward comes after the forward that it needs. The order can therefore be
    executed with any placement of stages.
    """
    padded = interleaved(rank, chunks, pipeline, microbatches)
    yield from (op for op in padded if op.kind == FORWARD)


def _alternate(forwards: Sequence[Op], backwards: Sequence[Op], warm_up: int) -> Iterator[Op]:
    """Yield `warm_up` forwards (or all forwards if there are fewer), then forwards and backwards
    alternately, and then the remaining backwards."""
    warm_up = min(warm_up, len(forwards))
    yield from forwards[:warm_up]
    for forward, backward in zip(forwards[warm_up:], backwards, strict=False):
        yield forward
        yield backward
    yield from backwards[len(forwards) - warm_up :]


def _warm_up(rank: int, pipeline: int, virtual: int) -> int:
    """Return the number of forwards with which 1F1B, plain or interleaved, begins.

    Plain 1F1B begins with one forward for each later rank. Interleaved 1F1B begins with two
    forwards for each later rank, and with p = `pipeline` forwards for each chunk except the last
    (Narayanan et al. 2021, section 2.2.2).
    """
    if virtual == 1:
        return pipeline - rank - 1
    return 2 * (pipeline - rank - 1) + (virtual - 1) * pipeline


def _ahead(rank: int, pipeline: int, virtual: int, microbatches: int) -> int:
    """Return the number of forwards before the first backward in 1F1B, plain or interleaved. The
    forwards of phantom microbatches (see `interleaved`) are not counted."""
    count = _warm_up(rank, pipeline, virtual) + 1
    if virtual == 1:
        return min(count, microbatches)
    rounds, rest = divmod(microbatches, pipeline)
    whole = min(count, rounds * pipeline * virtual)
    chunks, more = divmod(min(count - whole, pipeline * virtual), pipeline)
    return whole + chunks * rest + min(more, rest)


def in_turn(stage: int, pipeline: int, virtual: int) -> int:
    """Return the rank of `stage` if the stages are placed on the p = `pipeline` ranks in turn. The
    result is `stage` modulo p: rank r holds the stages r, p + r, 2 p + r, ..."""
    return stage % pipeline


@dataclass(frozen=True)
class Bubble:
    """The idle time of a schedule.

    Each of p ranks is idle for (p - 1) `idle_s(F, I, W)`, where F, I and W are the times of a
    chunk's forward and of the two parts of its backward. `text` is the resulting formula of the
    bubble (idle time / ideal time).
    """

    idle_s: Callable[[float, float, float], float]
    text: str


FILL_AND_DRAIN = Bubble(lambda f, i, w: f + i + w, "(p - 1) / (v m)")
H1_BUBBLE = Bubble(lambda f, i, w: f + i - w, "(p - 1) (F + I - W) / (m (F + I + W))")
V_BUBBLE = Bubble(lambda f, i, w: f, "(p - 1) F / (v m (F + I + W))")


@dataclass(frozen=True)
class ScheduleKind:
    """The properties of a pipeline schedule, such as 1F1B.

    For p ranks, v chunks per rank and m microbatches, `generate(rank, stages of the rank, p, m)`
    yields the order of one rank, and `place(stage, p, v)` returns the rank of a stage.
    `earlier_holds_more` is True if each rank r holds at least as many microbatches as rank r + 1.
    More exactly, for each op of rank r + 1, rank r has an op on the same chunk. During its op, rank
    r has at least as many microbatches of every chunk in flight as rank r + 1 has during the
    corresponding op. If both ranks have equal stages, rank r therefore needs at least as much
    memory. If `splits` is True, each backward is split into two ops. `ahead(rank, p, v, m)` is a
    lower bound of the number of forwards that a rank runs before the first op that frees memory. A
    search uses this bound to exclude layouts that cannot fit. The default bound, 0, is valid for
    every schedule.
    """

    generate: Callable[[int, Sequence[int], int, int], Iterator[Op]]
    place: Callable[[int, int, int], int] = in_turn
    earlier_holds_more: bool = False
    splits: bool = False
    bubble: Bubble = FILL_AND_DRAIN
    ahead: Callable[[int, int, int, int], int] = lambda rank, pipeline, virtual, microbatches: 0


KINDS: dict[str, ScheduleKind] = {
    "gpipe": ScheduleKind(gpipe, earlier_holds_more=True, ahead=lambda r, p, v, m: v * m),
    "1f1b": ScheduleKind(one_forward_one_backward, earlier_holds_more=True, ahead=_ahead),
    "interleaved": ScheduleKind(interleaved, earlier_holds_more=True, ahead=_ahead),
    "forward": ScheduleKind(forward_only, earlier_holds_more=True),
    "zb-h1": ScheduleKind(zb_h1, splits=True, bubble=H1_BUBBLE),
    "zb-v": ScheduleKind(zb_v, on_a_v, splits=True, bubble=V_BUBBLE),
}


@lru_cache(maxsize=16384)
def placement(kind: str, pipeline: int, virtual: int) -> Placement:
    """Return the placement of the stages in the schedule `kind`, with `virtual` stages on each of
    `pipeline` ranks."""
    return _placement(KINDS[kind].place, pipeline, virtual)


@lru_cache(maxsize=4096)
def _placement(
    place: Callable[[int, int, int], int], pipeline: int, virtual: int
) -> Placement:  # schedules with the same placement share one `Placement` object
    return Placement(tuple(place(s, pipeline, virtual) for s in range(pipeline * virtual)))


def order(kind: str, placed: Placement, microbatches: int, rank: int) -> tuple[Op, ...]:
    """Return the ops of pipeline rank `rank` in the order in which the schedule `kind` runs them.
    `placed` is the placement of the stages."""
    generate = KINDS[kind].generate
    return tuple(generate(rank, placed.stages_of(rank), placed.pipeline, microbatches))


def forwards(schedule: Schedule, microbatches: int) -> Schedule:
    """Return a schedule that has only the forwards of `microbatches` microbatches, with the
    placement of `schedule`."""
    return _placed("forward", schedule.placement, microbatches)


def _placed(kind: str, placed: Placement, microbatches: int) -> Schedule:
    ranks = range(placed.pipeline)
    orders = tuple(order(kind, placed, microbatches, rank) for rank in ranks)
    return Schedule(kind, placed, microbatches, orders)


def build(kind: str, pipeline: int, virtual: int, microbatches: int) -> Schedule:
    """Return the schedule `kind` for `microbatches` microbatches, with `virtual` chunks on each of
    `pipeline` ranks.

    Raises InputError for an unknown kind, for a size below 1, and for a number of chunks per rank
    with which the kind cannot be used.
    """
    if kind not in KINDS:
        close = difflib.get_close_matches(kind, KINDS, n=1, cutoff=0.5)
        hint = f'did you mean "{close[0]}"? ' if close else ""
        raise InputError(f'schedule "{kind}" is unknown: {hint}Legal are {", ".join(KINDS)}')
    sizes = {"pipeline": pipeline, "virtual": virtual, "microbatches": microbatches}
    for name, size in sizes.items():
        if size < 1:
            raise InputError(f"schedule {kind}: {name} is {size}, must be at least 1")
    chunks = chunk_rule(kind, virtual)
    if chunks.broken:
        raise InputError(chunks.text())
    return _placed(kind, placement(kind, pipeline, virtual), microbatches)
