"""Taking turns: what several sides of a comparison measure, round by round, in changing order.

The machines are shared and their speed drifts, so only figures of one round are compared, and who
goes first changes from round to round, lest a trend favour somebody.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

T = TypeVar("T")
Side = Callable[[], float]  # returns how many things it did per second


def round_of(sides: Mapping[str, Callable[[], T]], number: int) -> dict[str, T]:
    """Round `number`: the result of each side; each round begins with the next side."""
    names = list(sides)
    first = number % len(names)
    return {name: sides[name]() for name in names[first:] + names[:first]}


def spread(values: Sequence[float], unit: str = "") -> str:
    """Median and, in brackets, least and greatest; "-" of nothing."""
    if not values:
        return "-"
    return f"{statistics.median(values):.2f}{unit} ({min(values):.2f} to {max(values):.2f})"


def compare(sides: Mapping[str, Side], plain: str, rounds: int) -> dict[str, dict[str, float]]:
    """Rates of all sides and their ratios to the one named `plain`, medians over the rounds."""
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
    """Print what `compare` found."""
    print(f"\n{title}")
    for name, row in table.items():
        print(
            f"  {name:<58} {row['per_s']:>14,.0f} {unit}  "
            f"{row['ratio']:.2f} [{row['least']:.2f}, {row['greatest']:.2f}]"
        )
