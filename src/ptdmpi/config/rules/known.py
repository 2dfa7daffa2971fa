"""A helper for rules about several sections. A rule about several sections is checked only if all
these sections could be read.
"""

from collections.abc import Callable, Iterator
from typing import Any, TypeVar, overload

A = TypeVar("A")
B = TypeVar("B")
C = TypeVar("C")
Mistake = TypeVar("Mistake")


@overload
def where_known(rule: Callable[[A], Iterator[Mistake]], a: A | None, /) -> Iterator[Mistake]: ...


@overload
def where_known(
    rule: Callable[[A, B], Iterator[Mistake]], a: A | None, b: B | None, /
) -> Iterator[Mistake]: ...


@overload
def where_known(
    rule: Callable[[A, B, C], Iterator[Mistake]], a: A | None, b: B | None, c: C | None, /
) -> Iterator[Mistake]: ...


def where_known(rule: Callable[..., Iterator[Mistake]], /, *sections: Any) -> Iterator[Mistake]:
    """Yield the mistakes that `rule` finds in these sections. If one of the sections is None,
    because it could not be read, yield nothing."""
    if all(section is not None for section in sections):
        yield from rule(*sections)
