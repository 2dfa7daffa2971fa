"""Suggestions for error messages: the legal numbers that are nearest to an illegal one."""

import math
from collections.abc import Iterable
from functools import lru_cache

MOST_TRIED = 10**6


@lru_cache(maxsize=4096)
def divisors(number: int) -> list[int]:
    """Return all divisors of `number` >= 1, in ascending order.

    Only prime factors up to MOST_TRIED are tried, and the remaining factor is assumed to be a
    prime. The result can be wrong only for a number above MOST_TRIED**2 that has two prime factors
    above MOST_TRIED. Such a large number in a configuration is surely a typing mistake.
    """
    products = [1]
    rest = number
    prime = 2
    while rest > 1:
        if prime > min(math.isqrt(rest), MOST_TRIED):
            prime = rest
        times = 0
        while rest % prime == 0:
            rest = rest // prime
            times = times + 1
        products = [product * prime**power for power in range(times + 1) for product in products]
        prime += 1
    return sorted(products)


def nearest(number: int, legal: Iterable[int], count: int = 3) -> str:
    """Return a text with the `count` legal numbers nearest to `number`, in ascending order, such as
    "2 or 4 or 8"."""
    chosen = sorted(sorted(set(legal), key=lambda k: (abs(k - number), k))[:count])
    return " or ".join(map(str, chosen))
