"""Rates of several sides of a comparison, taken in turn."""

import statistics
from collections.abc import Callable

Side = Callable[[], float]  # returns how many things it did per second


def compare(sides: dict[str, Side], plain: str, rounds: int) -> dict[str, dict[str, float]]:
    """Rates of all sides and their ratios to the plain one, taken in turn."""
    rates: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(rounds + 1):
        names = list(sides)[:: 1 if number % 2 else -1]
        for name in names:
            rate = sides[name]()
            if number:  # the round before the first warms up
                rates[name].append(rate)
    table = {}
    for name, mine in rates.items():
        ratios = [a / b for a, b in zip(mine, rates[plain], strict=True)]
        table[name] = {
            "per_s": statistics.median(mine),
            "ratio": statistics.median(ratios),
            "least": min(ratios),
            "greatest": max(ratios),
        }
    return table


def show(title: str, unit: str, table: dict[str, dict[str, float]]) -> None:
    print(f"\n{title}")
    for name, row in table.items():
        print(
            f"  {name:<58} {row['per_s']:>14,.0f} {unit}  "
            f"{row['ratio']:.2f} [{row['least']:.2f}, {row['greatest']:.2f}]"
        )
