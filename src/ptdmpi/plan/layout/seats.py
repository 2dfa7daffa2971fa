"""Who takes which place of the grid after ranks were lost. Pure, the same answer on every rank."""

from collections.abc import Sequence

from ptdmpi.plan.layout.grid import Coordinates, Grid

# The axis that gives way when ranks are lost: fewer replicas train the same batch.
YIELDING = "replicate"


def widest(grid: Grid, ranks: int, begun: Grid, sequences: int) -> Grid | None:
    """The grid with most data ranks that `ranks` living ranks can fill, where `grid` stood; None if
    they cannot hold the model once. `begun` is that of the undisturbed run; `sequences` as below.

    Copies give way first. If that does not do, state is cut into fewer shards, and into as many as
    before where they divide the data ranks that are left.
    """
    shards = grid["shard"]
    alone = grid.size // grid.data_size
    copies = widest_data_size(ranks, alone * shards, begun.data_size // shards, sequences // shards)
    if copies:
        return grid.resized(YIELDING, copies)
    data = widest_data_size(ranks, alone, begun.data_size, sequences)
    if not data:
        return None
    fewer = max(n for n in range(1, min(shards, data) + 1) if data % n == 0)
    return grid.resized("shard", fewer).resized(YIELDING, data // fewer)


def widest_data_size(ranks: int, model_ranks: int, most: int, sequences: int) -> int:
    """The largest d that `ranks` living ranks can hold; 0 if they cannot hold the model once.

    `model_ranks`: the ranks of one replica, such as t p; `most`: d of the undisturbed run;
    `sequences` = B / b, to be divided by d.
    """
    legal = (d for d in range(min(most, ranks // model_ranks), 0, -1) if sequences % d == 0)
    return next(legal, 0)


def seats(grid: Grid, held: Sequence[Coordinates | None], nodes: Sequence[int]) -> list[int]:
    """For each rank of `grid` the survivor that takes it.

    `held[i]` is where survivor i stood before (None: it had no place), in a grid that differs from
    `grid` in its size d at most; `nodes[i]` its node. The replicas of the model that lost least go
    on as they are, so whoever can stay, stays: tensor groups keep to their nodes, and hardly any
    state must travel. A hole is filled by a rank that holds what is needed, else by one of the same
    node, else by the first.
    """
    replicas: dict[int, dict[tuple[int, ...], int]] = {}
    free = []
    for survivor, place in enumerate(held):
        row = None if place is None else replicas.setdefault(place[YIELDING], {})
        if place is None or row is None or _in_replica(grid, place) in row:
            free.append(survivor)
        else:
            row[_in_replica(grid, place)] = survivor
    best = sorted(replicas, key=lambda data: (-len(replicas[data]), data))
    for data in best[grid[YIELDING] :]:
        free += replicas[data].values()
    rows = [replicas[data] for data in sorted(best[: grid[YIELDING]])]
    rows += [{} for _ in range(grid[YIELDING] - len(rows))]
    # by node, and in a node by rank: what is filled from nothing is a grid as at the start
    free.sort(key=lambda survivor: (nodes[survivor], survivor))
    result = []
    for rank in range(grid.size):
        here = grid.coordinates(rank)
        row, seat = rows[here[YIELDING]], _in_replica(grid, here)
        if seat not in row:
            mates = (_in_replica(grid, grid.coordinates(mate)) for mate in _fast(grid, rank))
            near = {nodes[row[mate]] for mate in mates if mate in row}
            # False sorts first: who holds the state, then who shares a node: state is dearer
            fit = [(not _holds(grid, held[one], here), nodes[one] not in near) for one in free]
            row[seat] = free.pop(fit.index(min(fit)))
        result.append(row[seat])
    return result


def _in_replica(grid: Grid, place: Coordinates) -> tuple[int, ...]:
    return tuple(place[axis] for axis in grid.axes if axis != YIELDING)


def _fast(grid: Grid, rank: int) -> tuple[int, ...]:
    """The ranks that should share a node with `rank`: its group on the fastest axis."""
    return grid.group(rank, grid.axes[0])


def _holds(grid: Grid, place: Coordinates | None, wanted: Coordinates) -> bool:
    return place is not None and grid.part(place) == grid.part(wanted)
