"""Graphs over data ranks with doubly stochastic weights, step after step: each kind a class.

A topology over n ranks is a doubly stochastic matrix W for each step, of which w_ij is what rank i
takes of rank j: x_i <- sum_j w_ij x_j. Rows and columns sum to 1, so that the average over the
ranks stays what it is (exactly: weights are fractions here). Everything is a pure function of name,
n, seed and step, so that all ranks and the planner know the same graph, and nobody sends it.
"""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from functools import lru_cache

Row = Mapping[int, Fraction]  # rank -> weight above 0, ascending in rank


class Topology(ABC):
    """A graph over `size` ranks for each step. It repeats after `period` steps; None: never."""

    period: int | None = 1

    def __init__(self, name: str, size: int) -> None:
        self.name, self.size = name, size

    @abstractmethod
    def row(self, step: int, rank: int) -> Row:
        """w_ij of step `step` (from 0) for i = `rank`: what it takes of itself and of those that
        send to it."""

    @abstractmethod
    def column(self, step: int, rank: int) -> Row:
        """w_ij of a step for j = `rank`: what itself and those it sends to take of it."""

    def sources(self, step: int, rank: int) -> tuple[int, ...]:
        """The ranks that send to `rank`, ascending."""
        return tuple(peer for peer in self.row(step, rank) if peer != rank)

    def destinations(self, step: int, rank: int) -> tuple[int, ...]:
        """The ranks that `rank` sends to, ascending."""
        return tuple(peer for peer in self.column(step, rank) if peer != rank)

    @property
    def most_neighbours(self) -> int:
        """The most messages that a rank sends in a step."""
        steps = range(self.period or 1)
        return max(len(self.destinations(k, i)) for k in steps for i in range(self.size))

    def contraction(self) -> float:
        """The factor by which a step, on average over a period, shrinks the distance of replicas
        from their mean at least: ||W_(P-1) ... W_0 - 1 1^T / n||_2^(1/P)."""
        import numpy as np  # what only asks for neighbours starts without it

        product = np.eye(self.size)
        for step in range(self.period or 1):
            product = matrix(self, step) @ product
        norm = float(np.linalg.norm(product - 1 / self.size, 2)) if self.size > 1 else 0.0
        # what rounding leaves of an exact average is no distance
        return 0.0 if norm < 1e-12 else float(norm ** (1 / (self.period or 1)))

    @property
    def told(self) -> str:
        """For people: the graph, and how quickly it averages."""
        again = "another graph in each step" if self.period is None else f"{self.period} graphs"
        turns = "" if self.period == 1 else f", {again}"
        most = self.most_neighbours
        return (
            f"{self.name} of {self.size}{turns}, {most} neighbour{'s' * (most != 1)} each at most, "
            f"spectral gap {self.spectral_gap:.3g}"
        )

    @property
    def spectral_gap(self) -> float:
        """1 - `contraction`: 1 where a period averages exactly, near 0 where news travel slowly."""
        return 1.0 - self.contraction()


class Undirected(Topology):
    """A graph with edges in both directions and Metropolis-Hastings weights, w_ij = 1 / (1 +
    max(degrees of i and j)): symmetric, on any graph (Xiao, Boyd, Kim 2007, J. Parallel Distrib.
    Comput. 67, eq. 6)."""

    def __init__(self, name: str, size: int, near: Callable[[int], set[int]]) -> None:
        """`near(i)`: the neighbours of i; may name i itself, which is none."""
        super().__init__(name, size)
        self._near = lru_cache(maxsize=4096)(lambda rank: sorted(near(rank) - {rank}))

    def row(self, step: int, rank: int) -> Row:
        peers = self._near(rank)
        degrees = {peer: max(len(peers), len(self._near(peer))) for peer in peers}
        return _completed(rank, {peer: Fraction(1, 1 + n) for peer, n in degrees.items()})

    column = row


class Edges(Topology):
    """A graph with given symmetric weights: `rows[i]` has those of the neighbours of i."""

    def __init__(self, name: str, rows: Sequence[Row]) -> None:
        super().__init__(name, len(rows))
        self._rows = [_completed(rank, row) for rank, row in enumerate(rows)]

    def row(self, step: int, rank: int) -> Row:
        return self._rows[rank]

    column = row


class Circulant(Topology):
    """In step k every rank i takes an equal part of itself and of ranks i - s, s in `offsets[k]`:
    directed, and the same seen from each rank."""

    def __init__(self, name: str, size: int, offsets: Sequence[Sequence[int]]) -> None:
        super().__init__(name, size)
        self.offsets = offsets
        self.period = len(offsets)

    def row(self, step: int, rank: int) -> Row:
        return self._equal(step, rank, -1)

    def column(self, step: int, rank: int) -> Row:
        return self._equal(step, rank, 1)

    def _equal(self, step: int, rank: int, sign: int) -> Row:
        offsets = self.offsets[step % len(self.offsets)]
        weight = Fraction(1, 1 + len(offsets))
        peers = sorted((rank + sign * offset) % self.size for offset in (0, *offsets))
        return dict.fromkeys(peers, weight)


class RandomPairs(Topology):
    """In each step the ranks are paired anew, by a permutation keyed by seed and step, and the two
    of a pair average; of an odd number one stays alone (a matching, as in randomised gossip: Boyd,
    Ghosh, Prabhakar, Shah 2006, IEEE Trans. Inf. Theory 52)."""

    period = None

    def __init__(self, name: str, size: int, seed: int) -> None:
        super().__init__(name, size)
        self._pairs = lru_cache(maxsize=4)(lambda step: _pairs(size, seed, step))

    def row(self, step: int, rank: int) -> Row:
        peer = self._pairs(step)[rank]
        if peer == rank:
            return {rank: Fraction(1)}
        return dict.fromkeys(sorted((rank, peer)), Fraction(1, 2))

    column = row

    def contraction(self) -> float:
        """In the mean square: sqrt(lambda_2(E[W^T W])) (Boyd et al. 2006, section II). A matching's
        W is a projection, so this is lambda_2 of E[W], which is the same between all ranks."""
        if self.size < 2:
            return 0.0
        paired = (self.size - self.size % 2) / self.size  # how likely it is that a rank is in one
        return float((1 - paired / 2 * self.size / (self.size - 1)) ** 0.5)


def _pairs(size: int, seed: int, step: int) -> list[int]:
    """Whom each rank is paired with in a step; itself if it is left over."""

    # a hash: the shuffles of Python and numpy may change between their versions
    def drawn(rank: int) -> bytes:
        return hashlib.sha256(f"pairs {seed} {step} {rank}".encode()).digest()

    order = sorted(range(size), key=drawn)
    peers = list(range(size))
    for one, other in zip(order[::2], order[1::2], strict=False):
        peers[one], peers[other] = other, one
    return peers


def _completed(rank: int, row: Row) -> Row:
    """`row` with what is left to the rank itself, ascending."""
    own = Fraction(1) - sum(row.values())
    whole = {**row, rank: own} if own else dict(row)
    return {peer: whole[peer] for peer in sorted(whole)}


def matrix(found: Topology, step: int) -> list[list[float]]:
    """W of a step, rounded once: [n][n]."""
    return [list(_dense(found.row(step, rank), found.size)) for rank in range(found.size)]


def _dense(row: Row, size: int) -> Iterator[float]:
    return (float(row.get(peer, 0)) for peer in range(size))
