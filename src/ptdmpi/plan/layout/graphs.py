"""Graphs over data ranks, which say which ranks average their values in each step of decentralised
training. Each kind of graph is a class.

A topology over n ranks is a sequence of doubly stochastic matrices W, one for each step. The entry
w_ij of W is the weight that rank i gives to the values of rank j: x_i <- sum_j w_ij x_j. Rows and
columns sum to 1, so a step does not change the average over the ranks. The sums are exact, because
weights are stored as fractions. A graph is a pure function of name, n, seed and step. Therefore all
ranks and the planner compute the same graph by themselves, and the graph is never sent.
"""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from functools import lru_cache

Row = Mapping[int, Fraction]  # rank -> weight above 0, ascending in rank


class Topology(ABC):
    """A sequence of graphs over `size` ranks, one graph for each step. The sequence repeats after
    `period` steps. If `period` is None, the sequence never repeats."""

    period: int | None = 1

    def __init__(self, name: str, size: int) -> None:
        self.name, self.size = name, size

    @abstractmethod
    def row(self, step: int, rank: int) -> Row:
        """Return row i = `rank` of the matrix W of step `step` (counted from 0), as a dict from j
        to the weight w_ij.

        These are the weights that `rank` gives to its own values and to the values of the ranks
        that send to `rank`.
        """

    @abstractmethod
    def column(self, step: int, rank: int) -> Row:
        """Return column j = `rank` of the matrix W of step `step` (counted from 0), as a dict from
        i to the weight w_ij.

        These are the weights that `rank` itself, and the ranks to which `rank` sends, give to the
        values of `rank`.
        """

    def sources(self, step: int, rank: int) -> tuple[int, ...]:
        """Return the ranks that send to `rank` in a step, ascending."""
        return tuple(peer for peer in self.row(step, rank) if peer != rank)

    def destinations(self, step: int, rank: int) -> tuple[int, ...]:
        """Return the ranks that `rank` sends to in a step, ascending."""
        return tuple(peer for peer in self.column(step, rank) if peer != rank)

    @property
    def most_neighbours(self) -> int:
        """Return the largest number of messages that any rank of this graph sends in a step. All
        steps of a period are considered, or, without a period, only the first step."""
        steps = range(self.period or 1)
        return max(len(self.destinations(k, i)) for k in steps for i in range(self.size))

    def contraction(self) -> float:
        """Return the factor by which a step multiplies the distance of the replicas from their
        mean, in the worst case.

        The result is the geometric mean over a period of P steps, where n is the number of ranks:
        ||W_(P-1) ... W_0 - 1 1^T / n||_2^(1/P).
        """
        # import numpy only here, so that code that needs only neighbours works without numpy
        import numpy as np

        product = np.eye(self.size)
        for step in range(self.period or 1):
            product = matrix(self, step) @ product
        norm = float(np.linalg.norm(product - 1 / self.size, 2)) if self.size > 1 else 0.0
        # if the period computes the exact average, the norm is only a rounding error
        return 0.0 if norm < 1e-12 else float(norm ** (1 / (self.period or 1)))

    @property
    def description(self) -> str:
        """Return a description of the graph, with its spectral gap, for output to the user."""
        again = "another graph in each step" if self.period is None else f"{self.period} graphs"
        turns = "" if self.period == 1 else f", {again}"
        most = self.most_neighbours
        return (
            f"{self.name} of {self.size}{turns}, {most} neighbour{'s' * (most != 1)} each at most, "
            f"spectral gap {self.spectral_gap:.3g}"
        )

    @property
    def spectral_gap(self) -> float:
        """Return the spectral gap, 1 - `contraction`. The spectral gap is 1 if the steps of a
        period together compute the exact average, and near 0 if replicas approach the average
        slowly."""
        return 1.0 - self.contraction()


class Undirected(Topology):
    """A graph with edges in both directions and Metropolis-Hastings weights.

    w_ij = 1 / (1 + max(degrees of i and j)). These weights are symmetric and exist for any graph
    (Xiao, Boyd, Kim 2007, J. Parallel Distrib. Comput. 67, eq. 6).
    """

    def __init__(self, name: str, size: int, near: Callable[[int], set[int]]) -> None:
        """Build the graph. `near(i)` returns the neighbours of rank i, and may include i itself."""
        super().__init__(name, size)
        self._near = lru_cache(maxsize=4096)(lambda rank: sorted(near(rank) - {rank}))

    def row(self, step: int, rank: int) -> Row:
        peers = self._near(rank)
        degrees = {peer: max(len(peers), len(self._near(peer))) for peer in peers}
        return _completed(rank, {peer: Fraction(1, 1 + n) for peer, n in degrees.items()})

    column = row


class Edges(Topology):
    """A graph with given symmetric weights: `rows[i]` has the weights of the neighbours of rank
    i."""

    def __init__(self, name: str, rows: Sequence[Row]) -> None:
        super().__init__(name, len(rows))
        self._rows = [_completed(rank, row) for rank, row in enumerate(rows)]

    def row(self, step: int, rank: int) -> Row:
        return self._rows[rank]

    column = row


class Circulant(Topology):
    """A directed graph with equal weights, in which every rank has neighbours at the same offsets.

    With n ranks, every rank i averages its values in step k with the values of the ranks i - s
    modulo n, for all s in `offsets[k]`. After a period, the offsets begin again.
    """

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
    """A random matching of ranks into pairs in each step, as in randomised gossip (Boyd, Ghosh,
    Prabhakar, Shah 2006, IEEE Trans. Inf. Theory 52). The two ranks of a pair average their values.

    The pairs are determined by a random permutation, which depends on the seed and the step. If the
    number of ranks is odd, one rank has no partner.
    """

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
        """Return the root mean square of the contraction, sqrt(lambda_2(E[W^T W])), where E is the
        expectation over the random matchings and lambda_2 the second largest eigenvalue.

        The formula is from Boyd et al. 2006, section II. For a matching, W is a projection, so W^T
        W is W. E[W] has the same weight between any two ranks, so lambda_2 of E[W] has a closed
        form.
        """
        if self.size < 2:
            return 0.0
        paired = (self.size - self.size % 2) / self.size  # probability that a rank is in a pair
        return float((1 - paired / 2 * self.size / (self.size - 1)) ** 0.5)


def _pairs(size: int, seed: int, step: int) -> list[int]:
    """Return the partner of each rank in a step. A rank without a partner is returned as its own
    partner."""

    # sort by a hash, because the shuffles of Python and numpy may change between versions
    def drawn(rank: int) -> bytes:
        return hashlib.sha256(f"pairs {seed} {step} {rank}".encode()).digest()

    order = sorted(range(size), key=drawn)
    peers = list(range(size))
    for rank, peer in zip(order[::2], order[1::2], strict=False):
        peers[rank] = peer
        peers[peer] = rank
    return peers


def _completed(rank: int, row: Row) -> Row:
    """Return `row` (weights by rank) with the weight of `rank` itself added, so that the weights
    add up to 1. The result is in ascending order of ranks."""
    own = Fraction(1) - sum(row.values())
    whole = {**row, rank: own} if own else dict(row)
    return {peer: whole[peer] for peer in sorted(whole)}


def matrix(topology: Topology, step: int) -> list[list[float]]:
    """Return the matrix W of the topology in step `step` (counted from 0), as n lists of n floats.
    Each weight is rounded only once, from an exact fraction to a float."""
    return [list(_dense(topology.row(step, rank), topology.size)) for rank in range(topology.size)]


def _dense(row: Row, size: int) -> Iterator[float]:
    return (float(row.get(peer, 0)) for peer in range(size))
