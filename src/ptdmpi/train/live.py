"""Transfer of the live state after a loss of ranks. The live state is the training state in the
memory of the surviving ranks. This module sends it to the ranks that continue the training.
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

# Maximum number of elements in one message. The number is limited, because MPI counts the bytes of
# a message in 32-bit integers.
MESSAGE_ELEMENTS = 1 << 26


@dataclass(frozen=True)
class Completed:
    """A training step that all ranks have completed: its number (from 1 on), its result and its
    duration."""

    number: int
    result: StepResult
    elapsed_s: float


@dataclass(frozen=True)
class Handover:
    """The state from which a training loop starts: either the live state of the surviving ranks, or
    the checkpoint that `resume` names.

    `load` is a function that copies the live state into the engine, and returns the number of steps
    for which this state was trained. If `load` is None, the training loop reads a checkpoint
    instead. `unfinished` is the last step of the live state, if a rank was lost before this step
    was recorded, validated and saved. Otherwise it is None. `answer` describes the data on which
    the live state was trained, and the data with which the run continues. `lost` is True if the
    loop starts after a loss of ranks but no live state exists. `unwritten` maps the name of a file
    to lines that could not be written because of a disk error; it is None without live state.
    """

    resume: str
    load: Callable[[Engine], int] | None = None
    unfinished: Completed | None = None
    answer: Answer | None = None
    lost: bool = False
    unwritten: Mapping[str, str] | None = None


@dataclass(frozen=True)
class Account:
    """The report of a surviving rank to the other survivors.

    `place` is the rank's position in the process grid before the loss. `step` is the number of
    steps for which the rank's state was trained, or None if the rank has no state. `completed` is
    the last step that the rank has trained, and `concluded` is the last step whose record,
    validation and saves are done. `saved` is the step and the path of the newest checkpoint.
    `asked` is the signal that asked the run to stop. `answer` describes the training data of the
    state. `unwritten` maps the name of a file to the lines that rank 0 could not write.
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
    """One transfer of state: rank `source` sends its state to rank `target`."""

    source: int
    target: int


# identifies a part of the model, by the coordinates on the axes that divide the model
Part = tuple[int, ...]
# identifies a replica of the model, by the coordinates on all other axes
Replica = tuple[int, ...]


def hold(engine: Engine, account: Account) -> Holding:
    """Return the training state of `engine` together with this rank's report `account`. The
    returned object does not refer to the engine, so the engine's other memory can be freed.
    """
    return Holding(account, engine.state.flats)


def live_step(accounts: Sequence[Account], grid: Grid, apart: bool = False) -> int | None:
    """Return the number of the step after which the survivors continue. Return None if the
    survivors do not have a complete state.

    Ranks do not update at the same moment, so the survivors' steps may differ by one. States of
    different steps are never mixed. The state after a step is complete if every part of the model
    is on at least one survivor. By default the function returns the newest step with a complete
    state. If `apart` is True (the data-parallel method lets replicas of the model differ), the
    function returns the step with the largest number of complete replicas, and the newest such step
    if there are several.
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
    """Return the replicas whose state after `step` is complete, as nested dicts: replica -> part of
    the model -> rank that has this part.
    """
    replicas: dict[Replica, dict[Part, int]] = {}
    for rank, place in _after(accounts, step).items():
        replicas.setdefault(grid.replica(place), {})[grid.part(place)] = rank
    return {
        replica: ranks for replica, ranks in sorted(replicas.items()) if grid.parts <= ranks.keys()
    }


def _after(accounts: Sequence[Account], step: int) -> dict[int, Coordinates]:
    """Return a dict: rank -> position of the rank in the old process grid. The dict has all ranks
    whose state is the state after `step`.
    """
    places = {rank: account.place for rank, account in enumerate(accounts) if account.step == step}
    return {rank: place for rank, place in places.items() if place is not None}


def routes(accounts: Sequence[Account], grid: Grid, order: Sequence[int], step: int) -> list[Route]:
    """Return one route for each rank of the new process grid: the route's source sends the state
    after `step` to this rank. If a rank already has the state that it needs, it is its own source.

    Rank `order[i]` gets position i of the grid. If several ranks have the same part of the state,
    they take turns as the source of this part.
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
    """Return the routes of the state after `step`, as `routes` does, for a method under which
    replicas differ.

    Each new replica gets the complete state of one old replica, because parts of different replicas
    must not be combined. Every complete old replica is used once before any is used twice. To send
    few parts, a new replica preferably gets the state of that old replica from which the new
    replica's ranks already have the most parts.
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
    """Return a dict: new replica -> old replica whose state it gets. `held` is the number of parts
    that need not be sent, for each pair (new replica, old replica). Pairs with a larger number are
    chosen first.
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
    """Begin to send this rank's state to the ranks that need it. Return the handles of the
    messages.

    The messages are sent by MPI, even if the run uses another transport for training, because the
    other transport is not yet connected in the new world.
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
