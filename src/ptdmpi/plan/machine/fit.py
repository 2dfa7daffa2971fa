"""Functions that fit a few numbers to measurements, for `make calibrate` and `ptdmpi probe`."""

import math
from collections.abc import Callable, Iterable, Sequence

import numpy as np


def distance(pairs: Iterable[tuple[float, float]]) -> float:
    """Return the root mean square of log(predicted / measured) over the pairs (predicted,
    measured)."""
    squares = [math.log(predicted / measured) ** 2 for predicted, measured in pairs]
    return math.sqrt(sum(squares) / len(squares))


def descend(
    loss: Callable[[list[float]], float], start: Sequence[float], most: float = math.inf
) -> list[float]:
    """Return the numbers that minimise `loss`, by coordinate descent from `start`.

    The descent multiplies or divides one number at a time by a factor that gets closer to 1.
    Coordinate descent is deterministic, and it is good enough for a few numbers. No number differs
    from its initial value by more than the factor `most`, so a number that the measurements do not
    determine stays near its initial value.
    """
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
    """Fit a model to the times of ring all-reduces. Return (start-up time in s, time of one ring
    step in s, rate in bytes/s).

    The modelled time on n ranks is T = start + 2 (n - 1) step + moved / rate. The fit minimises the
    sum of the squared relative errors. For each all-reduce, `ranks` has n, and `moved_bytes` has 2
    (n - 1) / n times the bytes of the tensor. If n is the same in all measurements, start and step
    cannot be determined separately, and the fit returns the solution of smallest norm.
    """
    times = np.asarray(times_s, dtype=float)
    steps = 2.0 * (np.asarray(ranks, dtype=float) - 1)
    columns = np.stack([np.ones_like(steps), steps, np.asarray(moved_bytes, dtype=float)], axis=1)
    weighted = columns / times[:, None]
    scale = weighted.max(axis=0)
    solution, *_ = np.linalg.lstsq(weighted / scale, np.ones_like(times), rcond=None)
    start, step, per_byte = solution / scale
    return float(max(start, 0.0)), float(max(step, 0.0)), float(1 / per_byte)
