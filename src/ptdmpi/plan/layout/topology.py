"""The topologies (communication graphs) of decentralised data parallelism by name, and a check that
the graphs of a topology are valid."""

from collections.abc import Callable, Sequence
from math import isqrt

from ptdmpi.config import Config, DataParallelConfig, InputError
from ptdmpi.plan.layout.edges import ranks_of, read_edges, sha256_of
from ptdmpi.plan.layout.graphs import Circulant, RandomPairs, Topology, Undirected


def sides(size: int) -> tuple[int, int]:
    """Return (rows, columns) of the grid of `size` ranks that is nearest to a square, with rows <=
    columns.

    If `size` is a prime, the grid is a line.
    """
    rows = next(k for k in range(isqrt(size), 0, -1) if size % k == 0)
    return rows, size // rows


def _powers(size: int) -> list[int]:
    """Return the powers of two below `size`: 1, 2, 4, ..."""
    return [1 << k for k in range((size - 1).bit_length())]


def _ring(size: int, seed: int) -> Topology:
    return Undirected("ring", size, lambda i: {(i - 1) % size, (i + 1) % size})


def _grid(size: int, seed: int) -> Topology:
    _, columns = sides(size)

    def near(rank: int) -> set[int]:
        beside = {rank - 1} if rank % columns else set()
        beside |= {rank + 1} if (rank + 1) % columns else set()
        return beside | {i for i in (rank - columns, rank + columns) if 0 <= i < size}

    return Undirected("grid", size, near)


def _torus(size: int, seed: int) -> Topology:
    _, columns = sides(size)

    def near(rank: int) -> set[int]:
        first = rank - rank % columns  # the first rank in the same row of the grid
        beside = {first + (rank + step) % columns for step in (-1, 1)}
        return beside | {(rank + step) % size for step in (-columns, columns)}

    return Undirected("torus", size, near)


def _hypercube(size: int, seed: int) -> Topology:
    # If the size is not a power of two, the hypercube has no ranks at the corners `size` and above.
    # Every rank still has a path to rank 0: each step of the path clears one bit of the rank's
    # number, which gives a smaller number (incomplete hypercubes: Katseff 1988, IEEE Trans. Comput.
    # 37).
    bits = _powers(size)
    return Undirected("hypercube", size, lambda i: {i ^ bit for bit in bits if i ^ bit < size})


def _complete(size: int, seed: int) -> Topology:
    return Circulant("complete", size, [range(1, size)])


def _exponential(size: int, seed: int) -> Topology:
    return Circulant("exponential", size, [_powers(size)])


def _one_peer(size: int, seed: int) -> Topology:
    # If n is a power of two, log2 n steps compute the exact average. For every n, the weights are
    # doubly stochastic (Assran et al. 2019, arXiv 1811.10792; Ying et al. 2021, arXiv 2110.13363).
    offsets = [[power] for power in _powers(size)]
    return Circulant("one_peer_exponential", size, offsets or [[]])


# Name of a topology -> function that makes the topology from the number of ranks (any number) and
# the run's seed.
TOPOLOGIES: dict[str, Callable[[int, int], Topology]] = {
    "ring": _ring,
    "grid": _grid,
    "torus": _torus,
    "hypercube": _hypercube,
    "exponential": _exponential,
    "one_peer_exponential": _one_peer,
    "random": lambda size, seed: RandomPairs("random", size, seed),
    "complete": _complete,
}


def topology(name: str, size: int, seed: int = 0) -> Topology:
    """Return the topology `name` over `size` ranks.

    `name` is one of `TOPOLOGIES`, or else the path of an edge list. Raises InputError if the file
    is not an edge list or does not fit `size`, and ValueError if `size` is below 1."""
    if size < 1:
        raise ValueError(f"a topology needs at least 1 rank, not {size}")
    made = TOPOLOGIES.get(name)
    if made:
        return made(size, seed)
    edges = read_edges(name, size, ", ".join(TOPOLOGIES))
    check(edges)
    return edges


def file_ranks(section: DataParallelConfig) -> int | None:
    """Return the number of data ranks in the file of edges that the section names as its topology.
    Return None if the topology is not a file.

    Raises InputError if the file cannot be read.
    """
    if section.method != "decentralized" or section.topology in TOPOLOGIES:
        return None
    return ranks_of(section.topology, ", ".join(TOPOLOGIES))


def file_sha256(section: DataParallelConfig) -> str | None:
    """Return a checksum of the edges in the file that the section names as its topology. Return
    None if the topology is not a file.

    Raises InputError if the file cannot be read, or if a line is not an edge.
    """
    if section.method != "decentralized" or section.topology in TOPOLOGIES:
        return None
    return sha256_of(section.topology, ", ".join(TOPOLOGIES))


def topology_of(config: Config) -> Topology:
    """Return the topology of a decentralised run.

    Raises InputError for the same reasons as `topology`, and also if the topology is a file and the
    run may continue with fewer ranks, because the file fits only one number of ranks.
    """
    name, size = config.data_parallel.topology, config.data_size
    if name not in TOPOLOGIES and config.run.on_failure == "shrink":
        raise InputError(
            f'data_parallel.topology = "{name}" is a graph over {size} data ranks, and '
            'run.on_failure = "shrink" continues with fewer ranks; legal: on_failure = "abort", or '
            f"one of {', '.join(TOPOLOGIES)}, whose graphs are made again for the remaining ranks"
        )
    return topology(name, size, config.run.seed)


def check(graph: Topology, steps: int = 16) -> None:
    """Check the graphs of a topology. Raise InputError unless repeated steps of the topology make
    all replicas converge to the average over all ranks.

    The weights must be above 0 and doubly stochastic in each step of a period (without a period, in
    each of the first `steps` steps). Each message that a rank expects must be sent by another rank.
    The graphs of a period must connect all ranks.
    """
    size, reached = graph.size, _Groups(graph.size)
    for step in range(graph.period or steps):
        columns = [dict(graph.column(step, rank)) for rank in range(size)]
        if any(sum(column.values()) != 1 for column in columns):
            raise InputError(f"topology {graph.name}: a column of weights does not sum to 1")
        for rank in range(size):
            row = graph.row(step, rank)
            if sum(row.values()) != 1 or min(row.values()) <= 0:
                raise InputError(
                    f"topology {graph.name}: the weights of rank {rank} are not above 0, or do not "
                    "sum to 1"
                )
            if any(columns[peer].get(rank) != weight for peer, weight in row.items()):
                raise InputError(
                    f"topology {graph.name}: rank {rank} expects messages that are not sent"
                )
            for peer in row:
                reached.join(rank, peer)
    if graph.period is not None and len(apart := reached.parts()) > 1:
        raise InputError(
            f"topology {graph.name}: ranks {_listed(apart[1])} are not connected with "
            f"{_listed(apart[0])}; legal: edges on which every rank is reached from every other"
        )


class _Groups:
    """Groups of connected ranks, merged one pair at a time (union-find)."""

    def __init__(self, size: int) -> None:
        self._above = list(range(size))

    def join(self, rank: int, other: int) -> None:
        """Merge the group of `rank` and the group of `other`."""
        self._above[self._top(rank)] = self._top(other)

    def _top(self, rank: int) -> int:
        while self._above[rank] != rank:
            self._above[rank] = self._above[self._above[rank]]
            rank = self._above[rank]
        return rank

    def parts(self) -> list[list[int]]:
        """Return the groups of connected ranks, in order of their first rank. The ranks of a group
        are ascending."""
        groups: dict[int, list[int]] = {}
        for rank in range(len(self._above)):
            groups.setdefault(self._top(rank), []).append(rank)
        return list(groups.values())


def _listed(ranks: Sequence[int]) -> str:
    few = ", ".join(map(str, ranks[:4]))
    return few if len(ranks) <= 4 else f"{few}, ... ({len(ranks)} in all)"
