"""Pipeline schedules as data: in which order each pipeline rank computes what.

A schedule holds no times, idle slots or messages: those are derived from it (`simulate`,
`program`). One generator yields the order of one rank; the table `KINDS` names them. Nothing
outside this file knows warm-up, steady state or cool-down.

In every schedule each stage runs its forwards, and its backwards, in ascending order of the
microbatches, so that gradients are summed in one order whatever the schedule and layout.
"""

import difflib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ptdmpi.config import InputError
from ptdmpi.config.layout import chunk_rule

FORWARD, BACKWARD = "F", "B"
_OP_TEXT = re.compile(rf"([{FORWARD}{BACKWARD}])(\d+)\.(\d+)", re.ASCII)


class DeadlockError(Exception):
    """Every rank that has work left waits for another one; the message names what each waits at."""


class Op(NamedTuple):
    """One computation: the forward or the backward of one microbatch through one stage."""

    kind: str
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.stage}.{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> "Op":
        """The op that prints as `text`, such as "F2.0"; raises ValueError for other text."""
        match = _OP_TEXT.fullmatch(text)
        if match is None:
            raise ValueError(f'"{text}" is no op: F2.0 is the forward of stage 2, microbatch 0')
        return cls(match[1], int(match[2]), int(match[3]))


@dataclass(frozen=True)
class Schedule:
    """The order of computation of each pipeline rank: `orders[rank]` is a sequence of ops.

    `pipeline`, `virtual` and `microbatches` are p, v and m; the model is cut into p v stages,
    of which rank r holds the v chunks r, p + r, 2 p + r, ...
    """

    kind: str
    pipeline: int
    virtual: int
    microbatches: int
    orders: tuple[tuple[Op, ...], ...]

    @property
    def stages(self) -> int:
        """Number of stages, p v."""
        return self.pipeline * self.virtual

    def rank_of(self, stage: int) -> int:
        """Pipeline rank that holds `stage`."""
        return stage % self.pipeline

    def source(self, op: Op) -> Op | None:
        """The op whose output tensor is the input of `op`; None at either end of the model."""
        kind, stage, microbatch = op
        if kind == FORWARD:
            return Op(FORWARD, stage - 1, microbatch) if stage > 0 else None
        return Op(BACKWARD, stage + 1, microbatch) if stage + 1 < self.stages else None

    def needs(self, op: Op) -> tuple[Op, ...]:
        """All that must have ended before `op` starts: its source, for a backward its forward."""
        source = self.source(op)
        sources = () if source is None else (source,)
        if op.kind == FORWARD:
            return sources
        return (*sources, Op(FORWARD, op.stage, op.microbatch))

    def peak_activations(self) -> tuple[int, ...]:
        """Most forwards in flight on each rank, in chunks (one chunk: 1/(p v) of the model).

        A forward is in flight from its start to the end of its backward, or to its own end where
        the schedule has no backward.
        """
        return tuple(_most_in_flight(order) for order in self.orders)

    @property
    def bubble_fraction_closed_form(self) -> float:
        """Idle over ideal time where nothing but filling and draining idles: (p - 1) / (v m).

        Narayanan et al. 2021, sections 2.2.1 and 2.2.2. It is exact for 1f1b, and for interleaved
        where p divides m.
        """
        return (self.pipeline - 1) / (self.virtual * self.microbatches)


def _most_in_flight(order: Sequence[Op]) -> int:
    kept = {(stage, microbatch) for kind, stage, microbatch in order if kind == BACKWARD}
    in_flight = peak = 0
    for kind, stage, microbatch in order:
        if kind == BACKWARD:
            in_flight -= 1
            continue
        peak = max(peak, in_flight + 1)
        in_flight += (stage, microbatch) in kept
    return peak


def gpipe(pipeline: int, virtual: int, microbatches: int, rank: int) -> Iterator[Op]:
    """All forwards, then all backwards (Huang et al. 2019, arXiv 1811.06965).

    With several chunks each one sees all microbatches before the next chunk starts (breadth
    first: Lamy-Poirier 2023, arXiv 2211.05953). Backwards run in ascending order, not in GPipe's
    descending one, for the sake of the order in which gradients are summed.
    """
    chunks = range(rank, pipeline * virtual, pipeline)
    yield from (Op(FORWARD, stage, i) for stage in chunks for i in range(microbatches))
    yield from (Op(BACKWARD, stage, i) for stage in reversed(chunks) for i in range(microbatches))


def one_forward_one_backward(
    pipeline: int, virtual: int, microbatches: int, rank: int
) -> Iterator[Op]:
    """PipeDream-Flush, 1F1B: Narayanan et al. 2021, section 2.2.1, Figure 4 (top).

    A rank starts with as many forwards as there are ranks behind it; from then on each forward is
    followed by a backward, so that at most p - r activations are in flight. `virtual` is 1.
    """
    (stage,) = range(rank, pipeline * virtual, pipeline)
    forwards = [Op(FORWARD, stage, i) for i in range(microbatches)]
    backwards = [Op(BACKWARD, stage, i) for i in range(microbatches)]
    yield from _alternate(forwards, backwards, warm_up=pipeline - rank - 1)


def interleaved(pipeline: int, virtual: int, microbatches: int, rank: int) -> Iterator[Op]:
    """Interleaved 1F1B: Narayanan et al. 2021, section 2.2.2, Figure 4 (bottom), for any m.

    Microbatches travel in groups of p: a rank runs a group through one of its chunks, then the
    same group through its next chunk. Warm-up is 2 (p - r - 1) + (v - 1) p forwards. One chunk
    per rank is 1F1B.

    That order needs p to divide m. Otherwise the order for m rounded up to a multiple of p is
    built and the ops of the phantom microbatches are left out. An op needs only ops of its own
    microbatch, so any execution of the full order is, with the phantoms skipped, an execution of
    what remains: complete and free of deadlock. Every chain of waiting ops of what remains is
    part of a chain of the full order, so the makespan is at most that of m rounded up.
    """
    if virtual == 1:
        yield from one_forward_one_backward(pipeline, virtual, microbatches, rank)
        return
    chunks = range(rank, pipeline * virtual, pipeline)
    groups = [range(i, i + pipeline) for i in range(0, microbatches, pipeline)]
    forwards = [Op(FORWARD, s, i) for group in groups for s in chunks for i in group]
    backwards = [Op(BACKWARD, s, i) for group in groups for s in reversed(chunks) for i in group]
    warm_up = 2 * (pipeline - rank - 1) + (virtual - 1) * pipeline
    padded = _alternate(forwards, backwards, warm_up)
    yield from (op for op in padded if op.microbatch < microbatches)


def forward_only(pipeline: int, virtual: int, microbatches: int, rank: int) -> Iterator[Op]:
    """The forwards of the interleaved schedule alone, for validation."""
    padded = interleaved(pipeline, virtual, microbatches, rank)
    yield from (op for op in padded if op.kind == FORWARD)


def _alternate(forwards: Sequence[Op], backwards: Sequence[Op], warm_up: int) -> Iterator[Op]:
    """`warm_up` forwards (or all, if fewer), then forward and backward in turn, then the rest."""
    warm_up = min(warm_up, len(forwards))
    yield from forwards[:warm_up]
    for forward, backward in zip(forwards[warm_up:], backwards, strict=False):
        yield forward
        yield backward
    yield from backwards[len(forwards) - warm_up :]


KINDS: dict[str, Callable[[int, int, int, int], Iterator[Op]]] = {
    "gpipe": gpipe,
    "1f1b": one_forward_one_backward,
    "interleaved": interleaved,
    "forward": forward_only,
}


def build(kind: str, pipeline: int, virtual: int, microbatches: int) -> Schedule:
    """The schedule `kind` for p = `pipeline`, v = `virtual`, m = `microbatches`.

    Raises InputError for an unknown kind, a size below 1, or 1f1b with several chunks per rank.
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
    generate = KINDS[kind]
    orders = tuple(
        tuple(generate(pipeline, virtual, microbatches, rank)) for rank in range(pipeline)
    )
    return Schedule(kind, pipeline, virtual, microbatches, orders)
