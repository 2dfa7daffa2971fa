"""Transient iterations of decentralised SGD by topology, on a quadratic, without chance.

    python -m benchmarks.less.transient [--ranks 16] [--steps 60000]

Worker i has f_i(x) = (x - b_i)^2 / 2 and a gradient with noise of variance sigma^2, so that a step
of X <- W (X - rate (X - b + noise)), the form that the trainer reproduces to 1e-10, is linear:
means and covariances of all workers are followed exactly, and nothing is sampled. With rate
1 / (k + k0) SGD over all n workers has an error of sigma^2 / (n k), and so has decentralised SGD in
the end; what comes before are its transient iterations (Pu, Olshevsky, Paschalidis 2020, arXiv
1906.02702): the steps until its mean square error stays below 1.25 times that of SGD over all
workers. They are of the order n / gap where workers' data are alike, n / gap^2 where they differ
(strongly convex; Ying et al. 2021, arXiv 2110.13363).
"""

import argparse
from collections.abc import Sequence

import numpy as np

from ptdmpi.plan.layout.graphs import Topology, matrix
from ptdmpi.plan.layout.topology import TOPOLOGIES, topology

OFFSET = 20  # k0: steps of less than 1 / 20 from the first on
ABOVE = 1.25  # times the error of SGD over all workers
SIGMA = 1.0


def optima(size: int, apart: float) -> np.ndarray:
    """b, [n]: sum 0, mean square `apart` squared; neighbours by number are alike, as a graph that
    knows nothing of data may have it at worst."""
    if apart == 0 or size == 1:
        return np.zeros(size)
    wave = np.cos(2 * np.pi * np.arange(size) / size)
    wave -= wave.mean()
    return apart * wave / np.sqrt((wave**2).mean())


def errors(found: Topology, steps: int, apart: float) -> np.ndarray:
    """E mean_i (x_i - x*)^2 after each step, [steps]; all workers begin at x*."""
    size, b = found.size, optima(found.size, apart)
    mean, covariance = np.zeros(size), np.zeros((size, size))
    weights = [np.array(matrix(found, step)) for step in range(found.period or 0)]
    result = np.empty(steps)
    for step in range(steps):
        w = weights[step % len(weights)] if weights else np.array(matrix(found, step))
        rate = 1 / (step + OFFSET)
        mean = w @ ((1 - rate) * mean + rate * b)
        noise = (1 - rate) ** 2 * covariance + (rate * SIGMA) ** 2 * np.eye(size)
        covariance = w @ noise @ w.T
        result[step] = (mean**2 + np.diag(covariance)).mean()
    return result


def transient(found: Topology, steps: int, apart: float) -> int | None:
    """Steps after which the error stays below `ABOVE` times that of SGD over all workers; None:
    more than `steps`."""
    whole = errors(topology("complete", found.size), steps, apart)
    above = np.flatnonzero(errors(found, steps, apart) > ABOVE * whole)
    if not len(above):
        return 0
    return None if above[-1] == steps - 1 else int(above[-1]) + 1


def rows(size: int, steps: int) -> list[tuple[str, float, int | None, int | None]]:
    """(topology, spectral gap, transient iterations of equal data, of different data)."""
    made = [topology(name, size) for name in TOPOLOGIES if name != "complete"]
    found = [(one, one.spectral_gap) for one in made]
    return [
        (one.name, gap, transient(one, steps, 0.0), transient(one, steps, 1.0))
        for one, gap in sorted(found, key=lambda pair: pair[1])
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, default=16)
    parser.add_argument("--steps", type=int, default=60_000)
    asked = parser.parse_args(arguments)
    print("| topology | spectral gap | transient iterations, equal data | different data |")
    print("|---|---|---|---|")
    for name, gap, alike, apart in rows(asked.ranks, asked.steps):
        told = [f"{n:,}" if n is not None else f"above {asked.steps:,}" for n in (alike, apart)]
        print(f"| `{name}` | {gap:.3f} | {told[0]} | {told[1]} |")


if __name__ == "__main__":
    main()
