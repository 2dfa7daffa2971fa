"""Rounds of a comparison. Each of the compared programs or methods (a "side") runs once in each
round, in changing order.

The machines are shared with other programs, and their speed drifts. Therefore only measurements of
the same round are compared, and each round begins with a different side, so that no side benefits
from the drift.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

T = TypeVar("T")
Side = Callable[[], float]  # returns the rate of the side, per second


def round_of(sides: Mapping[str, Callable[[], T]], number: int) -> dict[str, T]:
    """Return the result of each side in round `number`. Each round begins with a different side."""
    names = list(sides)
    first = number % len(names)
    return {name: sides[name]() for name in names[first:] + names[:first]}


def spread(values: Sequence[float], unit: str = "") -> str:
    """Return the median and, in brackets, the least and the greatest value; "-" if there are no
    values."""
    if not values:
        return "-"
    return f"{statistics.median(values):.2f}{unit} ({min(values):.2f} to {max(values):.2f})"


def compare(sides: Mapping[str, Side], plain: str, rounds: int) -> dict[str, dict[str, float]]:
    """Run each side (one of the compared programs or methods) once per round, in `rounds` rounds
    after a warm-up round. Return a table with a row for each side. "per_s" is the median over the
    rounds of the side's rate per second. The ratio of a round is this rate divided by the rate of
    the side `plain` in the same round. "ratio" is the median of the ratios, and "least" and
    "greatest" are the smallest and the largest ratio."""
    # the first round is a warm-up
    done = [round_of(sides, number) for number in range(rounds + 1)][1:]
    table = {}
    for name in sides:
        ratios = [rates[name] / rates[plain] for rates in done]
        table[name] = {
            "per_s": statistics.median(rates[name] for rates in done),
            "ratio": statistics.median(ratios),
            "least": min(ratios),
            "greatest": max(ratios),
        }
    return table


def show(title: str, unit: str, table: Mapping[str, Mapping[str, float]]) -> None:
    """Print a table that `compare` has returned."""
    print(f"\n{title}")
    for name, row in table.items():
        print(
            f"  {name:<58} {row['per_s']:>14,.0f} {unit}  "
            f"{row['ratio']:.2f} [{row['least']:.2f}, {row['greatest']:.2f}]"
        )
