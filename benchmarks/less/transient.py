"""Exact numbers of transient iterations of decentralized SGD on a quadratic problem.

    python -m benchmarks.less.transient [--ranks 16]

Worker i has the loss f_i(x) = (x - b_i)^2 / 2 and a gradient with noise of variance sigma^2. A step
of decentralized SGD is X <- W (X - rate (X - b + noise)), where X has the workers' parameters and W
is the mixing matrix. ptdmpi's trainer computes the same step, with differences below 1e-10. This
step is linear, so the means and covariances of all workers are computed exactly, without random
samples. With the learning rate 1 / (k + k0) in step k, SGD that averages over all n workers has an
error of sigma^2 / (n k). Decentralized SGD finally reaches the same error. The steps until then are
the transient iterations (Pu, Olshevsky, Paschalidis 2020, arXiv 1906.02702). In this module, the
transient iterations end when the mean square error stays below 1.25 times the error of SGD over all
workers. For strongly convex losses and a topology with the spectral gap `gap`, the number of
transient iterations is of the order n / gap if all workers have the same data, and n / gap^2 if the
data differs (Ying et al. 2021, arXiv 2110.13363).
"""

import argparse
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ptdmpi.plan.layout.graphs import Topology, matrix
from ptdmpi.plan.layout.topology import TOPOLOGIES, topology

OFFSET = 20  # k0: the first learning rate is 1 / 20
STEPS = 60_000
# the transient iterations end below this factor times the error of SGD over all workers
ABOVE = 1.25
SIGMA = 1.0


def optima(size: int, apart: float) -> np.ndarray:
    """Return the workers' minima b, [size], with sum 0 and mean square `apart` squared. Workers
    with neighbouring numbers have similar values, which is the worst case for a graph that does not
    depend on the data."""
    if apart == 0 or size == 1:
        return np.zeros(size)
    wave = np.cos(2 * np.pi * np.arange(size) / size)
    wave -= wave.mean()
    return apart * wave / np.sqrt((wave**2).mean())


def errors(graph: Topology, steps: int, apart: float) -> np.ndarray:
    """Return the expected mean over workers of (x_i - x*)^2 after each step, [steps]. All workers
    begin at the optimum x*."""
    size = graph.size
    b = optima(size, apart)
    mean = np.zeros(size)
    covariance = np.zeros((size, size))
    weights = [np.array(matrix(graph, step)) for step in range(graph.period or 0)]
    result = np.empty(steps)
    for step in range(steps):
        w = weights[step % len(weights)] if weights else np.array(matrix(graph, step))
        rate = 1 / (step + OFFSET)
        mean = w @ ((1 - rate) * mean + rate * b)
        noise = (1 - rate) ** 2 * covariance + (rate * SIGMA) ** 2 * np.eye(size)
        covariance = w @ noise @ w.T
        result[step] = (mean**2 + np.diag(covariance)).mean()
    return result


def transient(graph: Topology, steps: int, apart: float) -> int | None:
    """Return the number of steps after which the error stays below `ABOVE` times the error of SGD
    over all workers; None if this number is greater than `steps`."""
    whole = errors(topology("complete", graph.size), steps, apart)
    above = np.flatnonzero(errors(graph, steps, apart) > ABOVE * whole)
    if not len(above):
        return 0
    last = int(above[-1])
    return None if last == steps - 1 else last + 1


class TransientRow(NamedTuple):
    """The spectral gap of a topology, and its numbers of transient iterations: `alike` for equal
    data on all workers, and `different` for different data on each worker. None means that more
    iterations are needed than were computed."""

    topology: str
    gap: float
    alike: int | None
    different: int | None


def rows(size: int, steps: int) -> list[TransientRow]:
    """Return a row for each sparse topology of `size` workers. The topology with the smallest
    spectral gap is first."""
    graphs = [topology(name, size) for name in TOPOLOGIES if name != "complete"]
    gaps = {graph.name: graph.spectral_gap for graph in graphs}
    graphs.sort(key=lambda graph: gaps[graph.name])
    return [
        TransientRow(
            graph.name,
            gaps[graph.name],
            transient(graph, steps, 0.0),
            transient(graph, steps, 1.0),
        )
        for graph in graphs
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, default=16, help="workers")
    options = parser.parse_args(arguments)
    print("| topology | spectral gap | transient iterations, equal data | different data |")
    print("|---|---|---|---|")
    for row in rows(options.ranks, STEPS):
        counts = [
            f"above {STEPS:,}" if count is None else f"{count:,}"
            for count in (row.alike, row.different)
        ]
        print(f"| `{row.topology}` | {row.gap:.3f} | {' | '.join(counts)} |")


if __name__ == "__main__":
    main()
