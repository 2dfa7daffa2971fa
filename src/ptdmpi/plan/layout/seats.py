"""The assignment of surviving ranks to coordinates of the grid after ranks were lost. The
assignment depends only on the arguments of these functions, so all ranks compute the same
assignment."""

from collections.abc import Sequence

from ptdmpi.plan.layout.grid import TENSOR, Coordinates, Grid

# The axis that shrinks when ranks are lost, so that fewer replicas train the same batch.
YIELDING = "replicate"


def widest(grid: Grid, ranks: int, begun: Grid, sequences: int) -> Grid | None:
    """Return the grid that replaces `grid` after ranks were lost: the grid with the most data ranks
    that `ranks` surviving ranks can fill. `begun` is the grid with which the run began, and
    `sequences` is the number of microbatches in the global batch. If possible, the state is cut
    into as many shards as before, and only the number of copies is reduced. If there are too few
    ranks for a single copy, the state is cut into fewer shards. The new number of shards is then
    the largest divisor of the new number of data ranks that is at most the former number of shards.
    Experts stay distributed over the same number of ranks. Returns None if the ranks cannot hold
    one complete model.
    """
    shards, expert = grid["shard"], grid["data_expert"]
    alone = grid.size // grid.data_size * expert
    most, sequences = begun.data_size // expert, sequences // expert
    copies = widest_data_size(ranks, alone * shards, most // shards, sequences // shards)
    if copies:
        return grid.resized(YIELDING, copies)
    data = widest_data_size(ranks, alone, most, sequences)
    if not data:
        return None
    fewer = max(n for n in range(1, min(shards, data) + 1) if data % n == 0)
    return grid.resized("shard", fewer).resized(YIELDING, data // fewer)


def widest_data_size(ranks: int, model_ranks: int, most: int, sequences: int) -> int:
    """Return the largest data-parallel size that is possible with `ranks` surviving ranks; 0 if
    these ranks are too few to hold the model.

    `model_ranks` is the number of ranks of one replica. `most` is the data-parallel size with which
    the run began. `sequences` is the number of microbatches in the global batch, which the
    data-parallel size must divide.
    """
    legal = (d for d in range(min(most, ranks // model_ranks), 0, -1) if sequences % d == 0)
    return next(legal, 0)


def seats(grid: Grid, held: Sequence[Coordinates | None], nodes: Sequence[int]) -> list[int]:
    """Return, for each rank of `grid`, the index of the survivor that takes its coordinates.

    `held[i]` has the former coordinates of survivor i. It is None if survivor i was a spare rank,
    or if the number of shards has changed, so that no former shard can be used. Apart from this
    case, the former grid differs from `grid` at most in the size of the axis `YIELDING`. `nodes[i]`
    is the node of survivor i. The replicas that lost the fewest ranks are kept, and their ranks
    keep their coordinates. Tensor-parallel groups therefore stay on their nodes, and little state
    must be sent. A seat is a position in the grid whose rank was lost. A survivor is free if it has
    no former coordinates, or if its replica is not kept. The seat goes to a free survivor that
    holds the state of this position. If there is no such survivor, the seat goes to a free survivor
    on the node of the seat's tensor-parallel group, or else to the first free survivor."""
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
    # Sort by node, and within a node by rank. The ranks of a replica without survivors then have
    # the same order as at the start of a run.
    free.sort(key=lambda survivor: (nodes[survivor], survivor))
    result = []
    for rank in range(grid.size):
        here = grid.coordinates(rank)
        row, seat = rows[here[YIELDING]], _in_replica(grid, here)
        if seat not in row:
            mates = (_in_replica(grid, grid.coordinates(mate)) for mate in _fast(grid, rank))
            near = {nodes[row[mate]] for mate in mates if mate in row}
            # The smallest pair is the best, and False is smaller than True. The first criterion is
            # the same state, because sending state costs more than messages between nodes. The
            # second criterion is the same node.
            fit = [
                (not _holds(grid, held[survivor], here), nodes[survivor] not in near)
                for survivor in free
            ]
            row[seat] = free.pop(fit.index(min(fit)))
        result.append(row[seat])
    return result


def _in_replica(grid: Grid, place: Coordinates) -> tuple[int, ...]:
    return tuple(place[axis] for axis in grid.axes if axis != YIELDING)


def _fast(grid: Grid, rank: int) -> tuple[int, ...]:
    """Return the ranks that should share a node with `rank`: the ranks of its tensor-parallel
    group, because this group communicates the most."""
    return grid.members(rank, TENSOR)


def _holds(grid: Grid, place: Coordinates | None, wanted: Coordinates) -> bool:
    return place is not None and grid.part(place) == grid.part(wanted)
