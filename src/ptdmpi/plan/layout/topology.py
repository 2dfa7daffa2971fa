"""Who averages with whom: the graphs of decentralised data parallelism by name, and their check."""

from collections.abc import Callable, Sequence
from math import isqrt

from ptdmpi.config import Config, DataParallelConfig, InputError
from ptdmpi.plan.layout.edges import ranks_of, read_edges, sha256_of
from ptdmpi.plan.layout.graphs import Circulant, RandomPairs, Topology, Undirected


def sides(size: int) -> tuple[int, int]:
    """The rows and columns, r <= c and r c = size, that are nearest to a square: of a prime a
    line."""
    rows = next(k for k in range(isqrt(size), 0, -1) if size % k == 0)
    return rows, size // rows


def _powers(size: int) -> list[int]:
    """1, 2, 4, ... below `size`: log2 of it, rounded up, of them."""
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
        first = rank - rank % columns  # of its row
        beside = {first + (rank + step) % columns for step in (-1, 1)}
        return beside | {(rank + step) % size for step in (-columns, columns)}

    return Undirected("torus", size, near)


def _hypercube(size: int, seed: int) -> Topology:
    # of a size that is no power of two the corners beyond it are missing: clearing bits of a number
    # makes it smaller, so every rank still has a way to rank 0 (Katseff 1988, IEEE Trans. Comput.
    # 37: incomplete hypercubes)
    bits = _powers(size)
    return Undirected("hypercube", size, lambda i: {i ^ bit for bit in bits if i ^ bit < size})


def _complete(size: int, seed: int) -> Topology:
    return Circulant("complete", size, [range(1, size)])


def _exponential(size: int, seed: int) -> Topology:
    return Circulant("exponential", size, [_powers(size)])


def _one_peer(size: int, seed: int) -> Topology:
    # Assran et al. 2019 (arXiv 1811.10792), Ying et al. 2021 (arXiv 2110.13363): in log2 n steps
    # an exact average where n is a power of two, and doubly stochastic for every n
    offsets = [[power] for power in _powers(size)]
    return Circulant("one_peer_exponential", size, offsets or [[]])


# By name; each takes the number of ranks and the run's seed, and is legal for every number.
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
    """The topology `name` over `size` ranks: one of `TOPOLOGIES`, else the path of an edge list.
    Raises InputError for a file that is none or does not fit."""
    if size < 1:
        raise ValueError(f"a topology over {size} ranks")
    made = TOPOLOGIES.get(name)
    if made:
        return made(size, seed)
    found = read_edges(name, size, ", ".join(TOPOLOGIES))
    check(found)
    return found


def file_ranks(section: DataParallelConfig) -> int | None:
    """Over how many data ranks the file is that a section names as its topology; None: it names
    none. Raises InputError where there is no such file."""
    if section.method != "decentralized" or section.topology in TOPOLOGIES:
        return None
    return ranks_of(section.topology, ", ".join(TOPOLOGIES))


def file_sha256(section: DataParallelConfig) -> str | None:
    """A checksum of the edges in the file that a section names as its topology; None: it names
    none. Raises InputError where there is no such file."""
    if section.method != "decentralized" or section.topology in TOPOLOGIES:
        return None
    return sha256_of(section.topology, ", ".join(TOPOLOGIES))


def topology_of(config: Config) -> Topology:
    """The topology of a decentralised run. Raises InputError, also for a file where ranks may be
    lost: what it names is a graph over all of them."""
    name, size = config.data_parallel.topology, config.data_size
    if name not in TOPOLOGIES and config.run.on_failure == "shrink":
        raise InputError(
            f'data_parallel.topology = "{name}" is a graph over {size} data ranks, and '
            'run.on_failure = "shrink" goes on with fewer; legal: on_failure = "abort", or one of '
            f"{', '.join(TOPOLOGIES)}, which are drawn anew for those that are left"
        )
    return topology(name, size, config.run.seed)


def check(found: Topology, steps: int = 16) -> None:
    """Raises InputError unless the weights of each step of a period (without one, of the first
    `steps`) are above 0 and doubly stochastic, with the same messages for who sends and who
    receives, and the graphs of a period connect all ranks."""
    size, reached = found.size, _Groups(found.size)
    for step in range(found.period or steps):
        columns = [dict(found.column(step, rank)) for rank in range(size)]
        if any(sum(column.values()) != 1 for column in columns):
            raise InputError(f"topology {found.name}: a column of weights does not sum to 1")
        for rank in range(size):
            row = found.row(step, rank)
            if sum(row.values()) != 1 or min(row.values()) <= 0:
                raise InputError(f"topology {found.name}: the weights of rank {rank} are no mean")
            if any(columns[peer].get(rank) != weight for peer, weight in row.items()):
                raise InputError(f"topology {found.name}: rank {rank} hears who does not send")
            for peer in row:
                reached.join(rank, peer)
    if found.period is not None and len(apart := reached.parts()) > 1:
        raise InputError(
            f"topology {found.name}: ranks {_listed(apart[1])} are not connected with "
            f"{_listed(apart[0])}; legal: edges on which every rank is reached from every other"
        )


class _Groups:
    """Ranks that have been joined, one by one, to groups."""

    def __init__(self, size: int) -> None:
        self._above = list(range(size))

    def join(self, one: int, other: int) -> None:
        self._above[self._top(one)] = self._top(other)

    def _top(self, rank: int) -> int:
        while self._above[rank] != rank:
            self._above[rank] = self._above[self._above[rank]]
            rank = self._above[rank]
        return rank

    def parts(self) -> list[list[int]]:
        """The groups, each ascending, by their first rank."""
        found: dict[int, list[int]] = {}
        for rank in range(len(self._above)):
            found.setdefault(self._top(rank), []).append(rank)
        return list(found.values())


def _listed(ranks: Sequence[int]) -> str:
    few = ", ".join(map(str, ranks[:4]))
    return few if len(ranks) <= 4 else f"{few}, ... ({len(ranks)} in all)"
