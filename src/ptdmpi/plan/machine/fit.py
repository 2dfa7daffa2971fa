"""Fitting the few numbers that are measured, for `make calibrate` and `ptdmpi probe`."""

import math
from collections.abc import Callable, Iterable, Sequence

import numpy as np


def distance(pairs: Iterable[tuple[float, float]]) -> float:
    """Root mean square of the relative errors of (predicted, measured), in logarithms."""
    squares = [math.log(predicted / measured) ** 2 for predicted, measured in pairs]
    return math.sqrt(sum(squares) / len(squares))


def descend(
    loss: Callable[[list[float]], float], start: Sequence[float], most: float = math.inf
) -> list[float]:
    """Coordinate descent by factors that shrink; deterministic, and enough for a few numbers. No
    number leaves its start by more than the factor `most`: what the data does not tell stays."""
    best, value, factor = list(start), loss(list(start)), 1.2
    while factor > 1.0005:
        improved = False
        for i in range(len(best)):
            for change in (factor, 1 / factor):
                tried = [x * change if j == i else x for j, x in enumerate(best)]
                if not 1 / most <= tried[i] / start[i] <= most:
                    continue
                if (new := loss(tried)) < value:
                    best, value, improved = tried, new, True
        if not improved:
            factor = math.sqrt(factor)
    return best


def fit_rings(
    ranks: Sequence[int], moved_bytes: Sequence[float], times_s: Sequence[float]
) -> tuple[float, float, float]:
    """(start in s, step in s, rate in bytes/s) of all-reduces: T = start + 2 (n - 1) step + moved /
    rate, by least squares of the relative errors.

    `moved_bytes` is 2 (n - 1) / n of the tensor. With one number of ranks start and step cannot be
    told apart, and share the constant by the smallest norm.
    """
    times = np.asarray(times_s, dtype=float)
    steps = 2.0 * (np.asarray(ranks, dtype=float) - 1)
    columns = np.stack([np.ones_like(steps), steps, np.asarray(moved_bytes, dtype=float)], axis=1)
    weighted = columns / times[:, None]
    scale = weighted.max(axis=0)
    found, *_ = np.linalg.lstsq(weighted / scale, np.ones_like(times), rcond=None)
    start, step, per_byte = found / scale
    return float(max(start, 0.0)), float(max(step, 0.0)), float(1 / per_byte)
