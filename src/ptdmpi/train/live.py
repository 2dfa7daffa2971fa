"""What ranks still hold of a run when others are lost, and its way to the ranks that go on."""

import itertools
import signal
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from ptdmpi.comm.communicator import Handle
from ptdmpi.comm.mpi import MpiCommunicator
from ptdmpi.comm.world import World
from ptdmpi.engine.engine import Engine, StepResult
from ptdmpi.lineage.judge import Answer
from ptdmpi.model.state import Counters
from ptdmpi.plan.layout.grid import CUTTING, Coordinates, Grid

# One message at most: counts of MPI calls are 32-bit integers.
MESSAGE_ELEMENTS = 1 << 26


@dataclass(frozen=True)
class Completed:
    """A step (1-based) that was trained on all ranks, and what came of it."""

    step: int
    result: StepResult
    elapsed_s: float


@dataclass(frozen=True)
class Handover:
    """What a loop starts from: `load` puts the live state of survivors into the engine and returns
    how many steps it has behind it; without it, the checkpoint that `resume` names is read.

    `unfinished`: the last of these steps, if a rank was lost before it was recorded, validated and
    saved. `answer`: what the state was trained on, and goes on with. `lost`: ranks were.
    """

    resume: str
    load: Callable[[Engine], int] | None = None
    unfinished: Completed | None = None
    answer: Answer | None = None
    lost: bool = False


@dataclass(frozen=True)
class Account:
    """What a rank tells the other survivors. `place` is where it stood in the last grid, `step` how
    many steps the state that it holds has behind it; None: it holds nothing. `asked`: by which
    signal to stop."""

    place: Coordinates | None = None
    step: int | None = None
    counters: Counters = field(default_factory=Counters)
    completed: Completed | None = None
    concluded: int = 0
    saved: tuple[int, str] | None = None
    asked: signal.Signals | None = None
    answer: Answer | None = None


@dataclass(frozen=True)
class Holding:
    """An account, and the state itself."""

    account: Account
    tensors: Sequence[Tensor] = ()


def hold(engine: Engine, account: Account) -> Holding:
    """The state of `engine`, which may be dropped then, but for these tensors."""
    return Holding(account, engine.state.flats)


def live_step(accounts: Sequence[Account], grid: Grid, apart: bool = False) -> int | None:
    """The newest step after which every place of the model is held by some rank; None if none is.
    Where replicas differ (`apart`), the one after which the most replicas are whole, of these the
    newest.

    Ranks update within a step of each other, but not together. States of different steps never mix.
    """
    steps = sorted({account.step for account in accounts if account.step is not None}, reverse=True)
    if apart:
        kept = {step: len(_whole(accounts, grid, step)) for step in steps}
        return max((step for step in steps if kept[step]), key=lambda one: kept[one], default=None)
    for step in steps:
        if grid.parts <= {grid.part(place) for place in _after(accounts, step).values()}:
            return step
    return None


def _whole(
    accounts: Sequence[Account], grid: Grid, step: int
) -> dict[tuple[int, ...], dict[tuple[int, ...], int]]:
    """The replicas whose state after `step` is whole: by their places on the axes that cut none,
    which rank holds which part."""
    found: dict[tuple[int, ...], dict[tuple[int, ...], int]] = {}
    for rank, place in _after(accounts, step).items():
        found.setdefault(_replica(grid, place), {})[grid.part(place)] = rank
    return {one: found[one] for one in sorted(found) if grid.parts <= found[one].keys()}


def _replica(grid: Grid, place: Coordinates) -> tuple[int, ...]:
    return tuple(place[axis] for axis in grid.axes if axis not in CUTTING)


def _after(accounts: Sequence[Account], step: int) -> dict[int, Coordinates]:
    """Where those stood that hold the state after `step`, by rank."""
    places = {rank: account.place for rank, account in enumerate(accounts) if account.step == step}
    return {rank: place for rank, place in places.items() if place is not None}


def routes(
    accounts: Sequence[Account], grid: Grid, order: Sequence[int], step: int
) -> list[tuple[int, int]]:
    """(from, to) for each rank of the grid: who hands it the state of `step`; itself if it has it.

    `order[i]` takes place i of the grid. Those that hold the same share the work.
    """
    found = []
    holders = _after(accounts, step)
    for place, target in enumerate(order):
        part = grid.part(grid.coordinates(place))
        sources = [rank for rank, stood in holders.items() if grid.part(stood) == part]
        own = target in sources
        found.append((target if own else sources[place % len(sources)], target))
    return found


def routes_apart(
    accounts: Sequence[Account], grid: Grid, order: Sequence[int], step: int
) -> list[tuple[int, int]]:
    """As `routes`, where replicas differ: every new replica is one old one as a whole, for parts of
    two would be no model. Each that is whole goes on once before one is copied; a new replica
    becomes that one of which its ranks hold the most already."""
    whole, at = _whole(accounts, grid, step), [grid.coordinates(n) for n in range(len(order))]
    new = sorted({_replica(grid, place) for place in at})
    holds = Counter(
        (_replica(grid, place), one)
        for target, place in zip(order, at, strict=True)
        for one, ranks in whole.items()
        if ranks[grid.part(place)] == target
    )
    pairs = sorted(itertools.product(new, whole), key=lambda pair: (-holds[pair], pair))
    chosen: dict[tuple[int, ...], tuple[int, ...]] = {}
    for replica, one in pairs:
        if replica not in chosen and one not in chosen.values():
            chosen[replica] = one
    for replica, one in zip((r for r in new if r not in chosen), itertools.cycle(whole)):
        chosen[replica] = one
    return [
        (whole[chosen[_replica(grid, place)]][grid.part(place)], target)
        for target, place in zip(order, at, strict=True)
    ]


def give(world: World, holding: Holding, ways: Sequence[tuple[int, int]]) -> list[Handle]:
    """Begin to send what others need of this rank; returns handles.

    Through MPI, whatever wire trains: the new world is not split yet, and the groups of the last
    one were revoked.
    """
    wire = MpiCommunicator(world.control)
    return [
        wire.isend(message, target)
        for source, target in ways
        if source == world.rank != target
        for tensor in holding.tensors
        for message in tensor.split(MESSAGE_ELEMENTS)
    ]


def take(world: World, engine: Engine, holding: Holding, source: int) -> None:
    """Fill the engine's tensors with what `source` sends, or with what this rank holds itself."""
    wire = MpiCommunicator(world.control)
    mine = holding.tensors if source == world.rank else ()
    targets = engine.state.flats
    # weights, then each moment, on all ranks alike; none are `mine` where others send
    for target, tensor in zip(targets, mine, strict=False):
        target.copy_(tensor)
    if not mine:
        for target in targets:
            for message in target.split(MESSAGE_ELEMENTS):
                wire.recv(message, source)
    engine.state.changed()
