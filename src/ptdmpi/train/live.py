"""The training state that survives a loss of ranks in the memory of the other ranks, and its
transfer to the ranks that continue.
"""

import itertools
import signal
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from ptdmpi.comm.communicator import Handle
from ptdmpi.comm.mpi import MpiCommunicator
from ptdmpi.comm.world import World
from ptdmpi.engine.engine import Engine
from ptdmpi.engine.result import StepResult
from ptdmpi.lineage.judge import Answer
from ptdmpi.model.state import Counters
from ptdmpi.plan.layout.grid import Coordinates, Grid

# The maximum number of elements in one message: MPI calls count bytes in 32-bit integers.
MESSAGE_ELEMENTS = 1 << 26


@dataclass(frozen=True)
class Completed:
    """A training step that all ranks have completed: its number (from 1 on), its result and its
    duration."""

    step: int
    result: StepResult
    elapsed_s: float


@dataclass(frozen=True)
class Handover:
    """The state from which a training loop starts: the live state of the surviving ranks, or the
    checkpoint that `resume` names.

    `load` is a function that copies the live state into the engine, and returns the number of steps
    for which this state was trained. If `load` is None, the training loop reads a checkpoint
    instead. `unfinished` is the last step of the live state, if a rank was lost before all ranks
    had recorded, validated and saved that step. `answer` describes the data on which this state was
    trained, and the data with which the run continues. `lost` is True if the loop starts because
    ranks were lost and no live state exists. `unwritten` maps the name of a file to lines that
    could not be written because the disk has failed; None if there is no live state.
    """

    resume: str
    load: Callable[[Engine], int] | None = None
    unfinished: Completed | None = None
    answer: Answer | None = None
    lost: bool = False
    unwritten: Mapping[str, str] | None = None


@dataclass(frozen=True)
class Account:
    """The report of a rank to the other surviving ranks.

    `place` has the coordinates of the rank in the process grid before the loss. `step` is the
    number of steps for which the rank's state was trained; None means that the rank has no state.
    `saved` has the step and the path of the newest checkpoint. `asked` is the signal that asked the
    run to stop. `answer` describes the training data of the state. `unwritten` maps the name of a
    file to the lines that rank 0 could not write.
    """

    place: Coordinates | None = None
    step: int | None = None
    counters: Counters = field(default_factory=Counters)
    completed: Completed | None = None
    concluded: int = 0
    saved: tuple[int, str] | None = None
    asked: signal.Signals | None = None
    answer: Answer | None = None
    unwritten: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Holding:
    """The report (`Account`) of a rank, and the tensors of its training state."""

    account: Account
    tensors: Sequence[Tensor] = ()


class Route(NamedTuple):
    """The route of a state: rank `source` sends it to rank `target`."""

    source: int
    target: int


Part = tuple[int, ...]  # A part of the model: coordinates on the axes that divide the model.
Replica = tuple[int, ...]  # A replica of the model: coordinates on all other axes.


def hold(engine: Engine, account: Account) -> Holding:
    """Return the training state of `engine`, together with `account`, the report of this rank. The
    returned object does not refer to the engine, so that the engine's other memory can be freed.
    """
    return Holding(account, engine.state.flats)


def live_step(accounts: Sequence[Account], grid: Grid, apart: bool = False) -> int | None:
    """Return the step after which the survivors continue; None if the survivors do not have the
    complete state after any step.

    The state after a step is complete if every part of the model is on some surviving rank. Usually
    the function returns the newest step with a complete state. If `apart` is True (replicas
    differ), it returns the step after which the largest number of replicas is complete; of several
    such steps, it returns the newest. Ranks do not update at the same moment, so their steps may
    differ by one. States of different steps are never mixed.
    """
    steps = sorted({account.step for account in accounts if account.step is not None}, reverse=True)
    if apart:
        replicas = {step: len(_whole(accounts, grid, step)) for step in steps}
        whole = [step for step in steps if replicas[step]]
        return max(whole, key=lambda step: replicas[step], default=None)
    for step in steps:
        if grid.parts <= {grid.part(place) for place in _after(accounts, step).values()}:
            return step
    return None


def _whole(accounts: Sequence[Account], grid: Grid, step: int) -> dict[Replica, dict[Part, int]]:
    """Return the replicas whose state after `step` is complete. For each replica, the result maps
    each part of the model to the rank that has this part.
    """
    replicas: dict[Replica, dict[Part, int]] = {}
    for rank, place in _after(accounts, step).items():
        replicas.setdefault(grid.replica(place), {})[grid.part(place)] = rank
    return {
        replica: ranks for replica, ranks in sorted(replicas.items()) if grid.parts <= ranks.keys()
    }


def _after(accounts: Sequence[Account], step: int) -> dict[int, Coordinates]:
    """Return the coordinates in the old process grid of each rank whose state is the state after
    `step`, by rank.
    """
    places = {rank: account.place for rank, account in enumerate(accounts) if account.step == step}
    return {rank: place for rank, place in places.items() if place is not None}


def routes(accounts: Sequence[Account], grid: Grid, order: Sequence[int], step: int) -> list[Route]:
    """Return, for each rank of the new grid, the rank that sends it the state after `step`. If a
    rank already has the state that it needs, the rank itself is its source.

    Rank `order[i]` gets position i of the grid. If several ranks have the same part of the state,
    the targets are divided among these ranks.
    """
    ways = []
    holders = _after(accounts, step)
    for place, target in enumerate(order):
        part = grid.part(grid.coordinates(place))
        sources = [rank for rank, before in holders.items() if grid.part(before) == part]
        source = target if target in sources else sources[place % len(sources)]
        ways.append(Route(source, target))
    return ways


def routes_apart(
    accounts: Sequence[Account], grid: Grid, order: Sequence[int], step: int
) -> list[Route]:
    """Return the routes of the state after `step`, like `routes`, if replicas differ.

    Each new replica gets the complete state of one old replica, because parts of different replicas
    do not fit together. The state of every complete old replica is used once before the state of
    any old replica is used twice. A new replica preferably gets the state of the old replica of
    which its ranks already have the most parts.
    """
    whole = _whole(accounts, grid, step)
    places = [grid.coordinates(number) for number in range(len(order))]
    held = Counter(
        (grid.replica(place), old)
        for target, place in zip(order, places, strict=True)
        for old, ranks in whole.items()
        if ranks[grid.part(place)] == target
    )
    new = sorted({grid.replica(place) for place in places})
    chosen = _matched(new, list(whole), held)
    return [
        Route(whole[chosen[grid.replica(place)]][grid.part(place)], target)
        for target, place in zip(order, places, strict=True)
    ]


def _matched(
    new: Sequence[Replica], whole: Sequence[Replica], held: Counter[tuple[Replica, Replica]]
) -> dict[Replica, Replica]:
    """Return, for each new replica, the old replica whose state it gets. Pairs (new replica, old
    replica) are chosen in descending order of `held`, the number of parts that need not be sent.
    """
    chosen: dict[Replica, Replica] = {}
    pairs = sorted(itertools.product(new, whole), key=lambda pair: (-held[pair], pair))
    for replica, old in pairs:
        if replica not in chosen and old not in chosen.values():
            chosen[replica] = old
    left = [replica for replica in new if replica not in chosen]
    chosen |= dict(zip(left, itertools.cycle(whole), strict=False))
    return chosen


def give(world: World, holding: Holding, ways: Sequence[Route]) -> list[Handle]:
    """Begin to send this rank's state to the ranks that need it; return the handles of the
    messages.

    The messages are sent by MPI, even if the run trains with another transport: the old
    communicators were revoked, and the transport of the new world is not connected yet.
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
    """Receive the engine's state from rank `source`, or copy it if `source` is this rank."""
    targets = engine.state.flats
    # all ranks send and receive the tensors in the same order: first the weights, then the
    # optimizer's moments one after the other
    if source == world.rank and holding.tensors:
        for target, tensor in zip(targets, holding.tensors, strict=False):
            target.copy_(tensor)
    else:
        wire = MpiCommunicator(world.control)
        for target in targets:
            for message in target.split(MESSAGE_ELEMENTS):
                wire.recv(message, source)
    engine.state.changed()
