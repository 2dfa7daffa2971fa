"""Rounds in which the sides of a comparison take turns, in changing order.

The machines are shared and their speed drifts. So only figures of the same round are compared, and
each round begins with another side, so that a trend favours none.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

T = TypeVar("T")
Side = Callable[[], float]  # returns how many things it did per second


def round_of(sides: Mapping[str, Callable[[], T]], number: int) -> dict[str, T]:
    """Return the result of each side in round `number`; each round begins with the next side."""
    names = list(sides)
    first = number % len(names)
    return {name: sides[name]() for name in names[first:] + names[:first]}


def spread(values: Sequence[float], unit: str = "") -> str:
    """Return the median and, in brackets, the least and the greatest value; "-" without values."""
    if not values:
        return "-"
    return f"{statistics.median(values):.2f}{unit} ({min(values):.2f} to {max(values):.2f})"


def compare(sides: Mapping[str, Side], plain: str, rounds: int) -> dict[str, dict[str, float]]:
    """Return the rate of each side ("per_s") and its ratio to that of the side `plain` ("ratio",
    "least", "greatest"); rates and ratios are medians over the rounds."""
    done = [round_of(sides, number) for number in range(rounds + 1)][1:]  # the first warms up
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
    """Print a table of `compare`."""
    print(f"\n{title}")
    for name, row in table.items():
        print(
            f"  {name:<58} {row['per_s']:>14,.0f} {unit}  "
            f"{row['ratio']:.2f} [{row['least']:.2f}, {row['greatest']:.2f}]"
        )
