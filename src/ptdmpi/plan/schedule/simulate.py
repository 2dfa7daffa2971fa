"""Simulation of a schedule with given costs. The result is a timeline of each rank's ops (forwards
and backwards of microbatches) and waits.

A training run also records a `Timeline`, so planned steps and measured steps are drawn by the same
function.
"""

import json
import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, Protocol

from ptdmpi.config import InputError
from ptdmpi.plan.schedule.ops import OP_KINDS, Op, kind_of_span
from ptdmpi.plan.schedule.orders import DeadlockError, Schedule

# The kinds of spans that are not ops of a schedule. (The spans of ops have the kinds in
# `OP_KINDS`.)
OTHER_SPANS = (
    "receive",  # the rank waits for the input of its next op
    "send",
    "gather",
    "reduce",
    "optimizer",
    "data",
    "other",
)
_COLUMNS = ["rank", "kind", "op", "start_s", "end_s"]


@dataclass(frozen=True, slots=True)
class Span:
    """A span: an activity of one rank from `start_s` to `end_s`.

    `kind` is the kind of an op (`OpKind.span`) or one of OTHER_SPANS. `op` is the text of an op,
    such as "F2.0" (the forward of stage 2 for microbatch 0). For the kinds "receive" and "send",
    `op` names the op whose output is received or sent. `op` is "" if the activity does not belong
    to an op, for example for the kind "optimizer".
    """

    rank: int
    kind: str
    op: str
    start_s: float
    end_s: float

    @property
    def computes(self) -> bool:
        """Return True for an op of a schedule, False for a message or work outside the pipeline."""
        return kind_of_span(self.kind) is not None


@dataclass(frozen=True)
class Timeline:
    """The spans of one training step on all ranks, planned or measured, in any order.

    `time_unit` is "s" if the times are in seconds. If the times are multiples of the cost of an op,
    `time_unit` is another text, such as "units of cost". `inside_s` maps each rank to the seconds
    that its ops spend in collectives, by group ("tensor", "shard").
    """

    spans: tuple[Span, ...]
    title: str = ""
    time_unit: str = "s"
    inside_s: Mapping[int, Mapping[str, float]] = field(default_factory=dict)

    @cached_property
    def start_s(self) -> float:
        """Return the start of the first span, or 0 if there are no spans."""
        return min((span.start_s for span in self.spans), default=0.0)

    @cached_property
    def makespan_s(self) -> float:
        """Return the time from the start of the first span to the end of the last span, or 0 if
        there are no spans."""
        return max((span.end_s for span in self.spans), default=0.0) - self.start_s

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """Return the ranks that have spans, ascending."""
        return tuple(sorted({span.rank for span in self.spans}))

    @cached_property
    def _compute_s(self) -> dict[int, float]:
        durations: dict[int, list[float]] = defaultdict(list)
        for span in self.spans:
            if span.computes:
                durations[span.rank].append(span.end_s - span.start_s)
        return {rank: math.fsum(of_rank) for rank, of_rank in durations.items()}

    def busy_s(self, rank: int) -> float:
        """Return the total time that `rank` spends in ops."""
        return self._compute_s.get(rank, 0.0)

    def bubble_fraction(self) -> float:
        """Return idle time divided by ideal time, (makespan - ideal) / ideal.

        The ideal time is the time that a rank spends in ops, as the mean over the ranks (Narayanan
        et al. 2021, section 2.2.1). Raises ValueError if no rank computes.
        """
        if not self._compute_s:
            raise ValueError("no op in this timeline: its bubble is undefined")
        # `fsum` rounds the sum only once, so the bubble is exactly 0 if there is no idle time
        ideal_s = math.fsum(self._compute_s.values()) / len(self.ranks)
        return (self.makespan_s - ideal_s) / ideal_s

    def to_json(self) -> str:
        """Return a JSON object with the title, the time unit, the names of the columns, the seconds
        that ops spend in collectives, and a row for each span."""
        rows = [[getattr(span, name) for name in _COLUMNS] for span in self.spans]
        head: dict[str, Any] = {
            "title": self.title,
            "time_unit": self.time_unit,
            "columns": _COLUMNS,
        }
        head["inside_s"] = {str(rank): seconds for rank, seconds in self.inside_s.items()}
        return json.dumps({**head, "spans": rows})

    @classmethod
    def from_json(cls, text: str) -> "Timeline":
        """Return the timeline that `to_json` wrote; raise InputError for any other text."""
        try:
            stored = json.loads(text)
            if stored["columns"] != _COLUMNS:
                raise ValueError(f"its columns are {stored['columns']}")
            spans = tuple(Span(*row) for row in stored["spans"])
            inside = {
                int(rank): {group: float(s) for group, s in of_rank.items()}
                for rank, of_rank in stored.get("inside_s", {}).items()
            }
            timeline = cls(spans, stored["title"], stored["time_unit"], inside)
            legal = {*OTHER_SPANS, *(kind.span for kind in OP_KINDS.values())}
            if any(span.kind not in legal or span.end_s < span.start_s for span in spans):
                raise ValueError("a span is of unknown kind or ends before it starts")
        except json.JSONDecodeError:
            raise InputError("this is not a timeline: not JSON, truncated or damaged") from None
        except ValueError as error:
            raise InputError(f"this is not a timeline that ptdmpi wrote: {error}") from error
        except (KeyError, TypeError, AttributeError, RecursionError) as error:
            raise InputError(
                "this is not a timeline that ptdmpi wrote: a key or a value is missing, or has the "
                "wrong type"
            ) from error
        return timeline


# The smallest and the greatest legal cost of an op. These limits are far from the limits of a
# float, so that sums and ratios are finite.
LEAST_COST, MOST_COST = 1e-12, 1e12


@dataclass(frozen=True)
class Costs:
    """The times of the ops of one chunk, and of a transfer to the next rank.

    A split backward spends the fraction `weight_share` of its time on the gradients of weights.
    Raises InputError unless the computing times are between LEAST_COST and MOST_COST, the transfer
    time is between 0 and MOST_COST, and `weight_share` is between 0.001 and 0.999.
    """

    forward_s: float = 1.0
    backward_s: float = 2.0
    transfer_s: float = 0.0
    weight_share: float = 0.5

    def __post_init__(self) -> None:
        for name, cost in (("forward", self.forward_s), ("backward", self.backward_s)):
            if not LEAST_COST <= cost <= MOST_COST:
                raise InputError(f"{name} cost {cost}: legal are {LEAST_COST:g} to {MOST_COST:g}")
        if not 0 <= self.transfer_s <= MOST_COST:
            raise InputError(f"transfer cost {self.transfer_s}: legal are 0 to {MOST_COST:g}")
        if not 0.001 <= self.weight_share <= 0.999:
            raise InputError(f"weight share {self.weight_share}: legal are 0.001 to 0.999")

    @property
    def input_s(self) -> float:
        """Return the time of the part of a split backward that computes the gradient of the
        input."""
        return self.backward_s - self.weight_s

    @property
    def weight_s(self) -> float:
        """Return the time of the part of a split backward that computes the gradients of
        weights."""
        return self.backward_s * self.weight_share

    def duration_s(self, op: Op) -> float:
        """Return the computing time of `op`, which is always above 0."""
        cost_s: float = getattr(self, op.row.cost)
        return cost_s * op.row.share

    def travel_s(self, op: Op) -> float:
        """Return the time that the input of `op` takes to arrive from another rank, counted from
        the end of the op that produces it."""
        return self.transfer_s


class OpCosts(Protocol):
    """The interface of the costs with which `execute` simulates a schedule. `Costs` and
    `plan.cost.pipeline.StageTimes` implement this interface."""

    def duration_s(self, op: Op) -> float:
        """Return the seconds for which `op` keeps its rank busy."""
        ...

    def travel_s(self, op: Op) -> float:
        """Return the seconds that the input of `op` takes to arrive from another rank, counted from
        the end of the op that produces it."""
        ...


class Interval(NamedTuple):
    """The interval during which an op runs: the times of its start and of its end."""

    start_s: float
    end_s: float


def execute(schedule: Schedule, costs: OpCosts) -> dict[Op, Interval]:
    """Return the interval of each op. A rank starts an op as soon as its previous op has ended and
    the inputs of the op have arrived.

    A tensor that is sent to another rank arrives `travel_s` after the end of the op that produces
    it. The transfer keeps neither rank busy. Raises DeadlockError if the ranks wait for each other
    in a circle.
    """
    done: dict[Op, Interval] = {}
    position = [0] * schedule.pipeline
    clock_s = [0.0] * schedule.pipeline
    waiting: dict[Op, int] = {}  # op that has not run -> the rank that waits for it
    runnable = list(range(schedule.pipeline))
    # the ranks may be taken in any order, because the start of an op depends only on the previous
    # op of its rank and on its inputs
    while runnable:
        rank = runnable.pop()
        order = schedule.orders[rank]
        while position[rank] < len(order):
            op = order[position[rank]]
            start_s, missing = clock_s[rank], None
            for need in schedule.needs(op):
                interval = done.get(need)
                if interval is None:
                    missing = need
                    break
                travel_s = 0.0 if schedule.rank_of(need.stage) == rank else costs.travel_s(op)
                start_s = max(start_s, interval.end_s + travel_s)
            if missing is not None:
                waiting[missing] = rank
                break
            clock_s[rank] = start_s + costs.duration_s(op)
            done[op] = Interval(start_s, clock_s[rank])
            position[rank] += 1
            if op in waiting:
                runnable.append(waiting.pop(op))
    if waiting:
        stuck = sorted((rank, missing) for missing, rank in waiting.items())
        places = (f"rank {r} at {schedule.orders[r][position[r]]} (needs {op})" for r, op in stuck)
        raise DeadlockError(f"the schedule cannot be executed: {', '.join(places)}")
    return done


def simulate(schedule: Schedule, costs: OpCosts) -> Timeline:
    """Return the timeline of one step of `schedule`, simulated with `costs`. The timeline starts at
    time 0.

    Raises DeadlockError if the ranks wait for each other in a circle.
    """
    times = execute(schedule, costs)
    spans = []
    for rank, order in enumerate(schedule.orders):
        clock_s = 0.0
        for op in order:
            start_s, end_s = times[op]
            if start_s > clock_s:  # a rank waits only for inputs from other ranks
                spans.append(
                    Span(
                        rank=rank,
                        kind="receive",
                        op=str(schedule.source(op)),
                        start_s=clock_s,
                        end_s=start_s,
                    )
                )
            spans.append(
                Span(rank=rank, kind=op.row.span, op=str(op), start_s=start_s, end_s=end_s)
            )
            clock_s = end_s
    return Timeline(tuple(spans))
