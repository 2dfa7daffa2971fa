"""Who takes which place of the grid after ranks were lost. Pure, the same answer on every rank."""

from collections.abc import Sequence

from ptdmpi.plan.layout.grid import Coordinates, Grid


def widest_data_size(ranks: int, model_ranks: int, most: int, sequences: int) -> int:
    """The largest d that `ranks` living ranks can hold; 0 if they cannot hold the model once.

    `model_ranks` = t p; `most`: d of the undisturbed run; `sequences` = B / b, to be divided by d.
    """
    legal = (d for d in range(min(most, ranks // model_ranks), 0, -1) if sequences % d == 0)
    return next(legal, 0)


def seats(grid: Grid, held: Sequence[Coordinates | None], nodes: Sequence[int]) -> list[int]:
    """For each rank of `grid` the survivor that takes it.

    `held[i]` is where survivor i stood before (None: it had no place), in a grid of the same t and
    p; `nodes[i]` its node. The replicas of the model that lost least go on as they are, so whoever
    can stay, stays: tensor groups keep to their nodes, and hardly any state must travel. A hole is
    filled by a rank that holds what is needed, else by one of the same node, else by the first.
    """
    replicas: dict[int, dict[tuple[int, int], int]] = {}
    free = []
    for survivor, place in enumerate(held):
        row = None if place is None else replicas.setdefault(place.data, {})
        if row is None or (place.tensor, place.pipeline) in row:
            free.append(survivor)
        else:
            row[place.tensor, place.pipeline] = survivor
    best = sorted(replicas, key=lambda data: (-len(replicas[data]), data))
    for data in best[grid.data :]:
        free += replicas[data].values()
    rows = [replicas[data] for data in sorted(best[: grid.data])]
    rows += [{} for _ in range(grid.data - len(rows))]
    # by node, and in a node by rank: what is filled from nothing is a grid as at the start
    free.sort(key=lambda survivor: (nodes[survivor], survivor))
    result = []
    for rank in range(grid.size):
        here = grid.coordinates(rank)
        row, place = rows[here.data], (here.tensor, here.pipeline)
        if place not in row:
            near = {nodes[row[other]] for other in row if other[1] == here.pipeline}
            fit = [(_holds(held[one]) != place, nodes[one] not in near) for one in free]
            row[place] = free.pop(fit.index(min(fit)))
        result.append(row[place])
    return result


def _holds(place: Coordinates | None) -> tuple[int, int] | None:
    return None if place is None else (place.tensor, place.pipeline)
