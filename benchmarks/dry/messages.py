"""Calls and bytes of NCCL in one training step on null GPUs, compared with the planner's counts."""

import ctypes
import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from mpi4py import MPI

from benchmarks.dry.bounds import OFF_PLAN
from benchmarks.dry.build import NCCL
from benchmarks.dry.kinds import LARGE, LARGE_VOCAB
from benchmarks.dry.steps import DEVICE, begin, offered_attention
from benchmarks.gpu.timing import Numbers, Row
from benchmarks.gpu.training import drawn_there, engine_on
from ptdmpi.base.traffic import Tally
from ptdmpi.config import Config, resolve
from ptdmpi.model.batch import Placing
from ptdmpi.plan.cost.traffic import StepTraffic
from tests._configs import layout, tree
from tests._engines import microbatches

RANKS = 2
CONTEXT = {"parallel.context": 2}
LAYOUTS: dict[str, dict[str, Any]] = {
    "t 2": layout(t=2),
    "t 2, sequence parallel": layout(t=2) | {"parallel.sequence_parallel": True},
    "p 2": layout(p=2),
    "p 2, zb-v": layout(p=2, v=2) | {"parallel.schedule": "zb-v"},
    "d 2": layout(d=2),
    "d 2, ZeRO 1": layout(d=2) | {"parallel.zero": 1},
    "d 2, ZeRO 2": layout(d=2) | {"parallel.zero": 2},
    "d 2, ZeRO 3": layout(d=2) | {"parallel.zero": 3},
    "c 2, all-gather": CONTEXT | {"parallel.context_method": "all_gather"},
    "c 2, ring": CONTEXT | {"parallel.context_method": "ring"},
    "c 2, ulysses": CONTEXT | {"parallel.context_method": "ulysses"},
}
# The kinds of NCCL's calls, in the order of `enum kind` (null/nccl.c).
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce")
KINDS += ("send", "receive", "to itself", "empty")
# Kinds whose calls have the number of elements of one rank's part, while `Tally` counts the parts
# of all ranks.
OF_PARTS = ("all_gather", "reduce_scatter")
# Kinds of calls that no transport of ptdmpi uses: `nccl` sends an all-to-all as a group of sends.
UNUSED = ("all_to_all", "reduce")
# Kinds of messages that our communicators send by NCCL's send.
BY_SENDS = ("all_to_all", "neighbours")


class Sent(NamedTuple):
    """The calls of one kind by one rank, and the bytes that the rank sends by these calls."""

    calls: int = 0
    sent_bytes: int = 0


Sends = Mapping[str, Sent]


class NullNccl:
    """The counters of the stand-in for NCCL."""

    def __init__(self, library: str = NCCL) -> None:
        """Open the library. Raise OSError if this process does not have the environment of the null
        GPU."""
        self._library = ctypes.CDLL(library)
        for name in ("null_nccl_calls", "null_nccl_bytes"):
            getattr(self._library, name).restype = ctypes.c_ulong

    def counts(self) -> list[tuple[int, dict[str, Sent]]]:
        """Return, for each communicator that this process has made, its number of ranks and its
        calls so far, by kind. The bytes are the sums of the calls' numbers of elements times the
        size of an element."""
        library = self._library
        return [
            (
                library.null_nccl_ranks(number),
                {
                    kind: Sent(
                        library.null_nccl_calls(number, place),
                        library.null_nccl_bytes(number, place),
                    )
                    for place, kind in enumerate(KINDS)
                },
            )
            for number in range(library.null_nccl_communicators())
        ]

    def open_groups(self) -> int:
        """Return the number of threads whose groups of calls have begun and not ended."""
        return int(self._library.null_nccl_open_groups())

    def tallies(self) -> tuple[list[Tally], Sent]:
        """Return the calls so far as tallies, one for each communicator, and all receives. Raises
        ValueError if a group of calls has not ended, or if a call has an unused kind."""
        if groups := self.open_groups():
            raise ValueError(f"{groups} groups of NCCL's calls have begun and not ended")
        tallies, received = [], Sent()
        for ranks, calls in self.counts():
            tally = Tally(ranks)
            for kind, counted in calls.items():
                if kind in UNUSED and counted.calls:
                    raise ValueError(f"{counted.calls} calls of {kind}, which no layout plans")
                if kind in tally.messages:
                    parts = ranks if kind in OF_PARTS else 1
                    tally.messages[kind] = counted.calls
                    tally.whole_bytes[kind] = counted.sent_bytes * parts
            tallies.append(tally)
            received = _plus(received, calls["receive"])
        return tallies, received


def _plus(a: Sent, b: Sent) -> Sent:
    return Sent(a.calls + b.calls, a.sent_bytes + b.sent_bytes)


def by_calls(tallies: Iterable[Tally]) -> dict[str, Sent]:
    """Return the calls of NCCL in these tallies, by kind, with the bytes that the rank sends. An
    all-to-all of n ranks is n - 1 sends."""
    found: dict[str, Sent] = {}
    for tally in tallies:
        for kind, sent_bytes in tally.sent_bytes.items():
            calls = tally.messages[kind] * (tally.ranks - 1 if kind == "all_to_all" else 1)
            name = "send" if kind in BY_SENDS else kind
            found[name] = _plus(found.get(name, Sent()), Sent(calls, sent_bytes))
    return {kind: sent for kind, sent in found.items() if sent.calls}


def planned(config: Config, stage: int, step: int) -> dict[str, Sent]:
    """Return the calls of the ranks of a pipeline stage in step `step`, by kind, according to the
    planner."""
    traffic = StepTraffic.of_config(config, LARGE_VOCAB).of(stage, step=step)
    return by_calls(traffic.tallies.values())


@functools.cache
def counted(name: str) -> list[tuple[Sends, Sends]]:
    """Run two training steps of a layout. Return, for each rank, the calls of the second step by
    kind: those that NCCL's stand-in counted, and those that the planner expects. All ranks call
    this function. Raises ValueError if ranks send other bytes than they receive, or if the planner
    expects no calls of a kind that was counted."""
    config, nccl = config_of(name), NullNccl()
    begin()
    with drawn_there():
        engine = engine_on(config, LARGE_VOCAB, DEVICE, wire="nccl")
    placing, here = Placing(DEVICE), engine.context.positions
    parts = microbatches(config, 0, engine.axes["data"].rank, vocab_size=LARGE_VOCAB)
    batches = [part.at(here) for part in parts]
    tallies: list[list[Tally]] = []
    received: list[Sent] = []
    with offered_attention():
        for step in range(2):
            engine.step(step, placing.place(batches))
            so_far, receives = nccl.tallies()
            tallies.append(so_far)
            received.append(receives)
    sent = by_calls(late.since(early) for early, late in zip(*tallies, strict=True))
    receives = Sent(*(late - early for early, late in zip(*received, strict=True)))
    expected = planned(config, engine.axes["pipeline"].rank, 1)
    rows = MPI.COMM_WORLD.allgather((sent, receives, expected))
    check(rows)
    return [(counts, plan) for counts, _, plan in rows]


def check(rows: Sequence[tuple[Sends, Sent, Sends]]) -> None:
    """Raise ValueError if ranks send other bytes than they receive, or if calls were counted that
    the planner does not expect. `rows` has, for each rank, the counted calls, the receives, and the
    planned calls."""
    sends = functools.reduce(_plus, (sent.get("send", Sent()) for sent, _, _ in rows))
    receives = functools.reduce(_plus, (received for _, received, _ in rows))
    if sends != receives:
        raise ValueError(
            f"ranks send {sends.sent_bytes} bytes in {sends.calls} calls, and receive "
            f"{receives.sent_bytes} in {receives.calls}"
        )
    for rank, (sent, _, expected) in enumerate(rows):
        if unplanned := sorted(sent.keys() - expected.keys()):
            raise ValueError(f"rank {rank} has calls that are not planned: {', '.join(unplanned)}")


def config_of(name: str) -> Config:
    """Return the configuration of a layout of LAYOUTS, in bfloat16."""
    return resolve(tree(LARGE | {"precision.compute": "bf16"} | LAYOUTS[name]), RANKS)


def of_kind(name: str, kind: str) -> Numbers:
    """Return the row of one kind of calls in a layout. All ranks call this function."""
    return row_of([(sent.get(kind), plan.get(kind)) for sent, plan in counted(name)])


def row_of(ranks: Sequence[tuple[Sent | None, Sent | None]]) -> Numbers:
    """Return a row of the table. `ranks` has, for each rank, the counted calls of a kind and the
    planned calls; None if there are none."""
    pairs = [(sent or Sent(), plan or Sent()) for sent, plan in ranks]
    off = [
        100.0 * (sent.sent_bytes / max(plan.sent_bytes, 1) - 1.0)
        for sent, plan in pairs
        if plan.calls
    ]
    return {
        "calls": _cell(str(sent.calls) for sent, _ in pairs),
        "planned calls": _cell(str(plan.calls) for _, plan in pairs),
        "MB sent": _cell(f"{sent.sent_bytes / 1e6:.6g}" for sent, _ in pairs),
        "planned MB": _cell(f"{plan.sent_bytes / 1e6:.6g}" for _, plan in pairs),
        OFF_PLAN: max(off, key=abs),
    }


def _cell(values: Iterable[str]) -> str:
    """Return the ranks' values as one cell: a single value if all ranks have the same."""
    every = list(values)
    return every[0] if len({*every}) == 1 else ", ".join(every)


def rows() -> Iterator[Row]:
    """Yield, for each layout and each kind of calls that the planner expects, a name and a function
    that returns the row. All ranks call this function."""
    for name in LAYOUTS:
        config = config_of(name)
        stages = range(config.layout.pipeline)
        kinds = {kind: None for stage in stages for kind in planned(config, stage, 1)}
        for kind in kinds:
            yield f"{name}: {kind}", partial(of_kind, name, kind)
