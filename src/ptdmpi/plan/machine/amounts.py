"""Types of numbers in cluster files, with bounds that detect wrong units."""

from typing import Annotated

from pydantic import AfterValidator, Field

# `strict=False`, so that a cluster file may have 2 instead of 2.0
PositiveNumber = Annotated[float, Field(gt=0, strict=False)]
NotNegative = Annotated[float, Field(ge=0, strict=False)]


# Two mistakes are likely in a cluster file: GB instead of bytes, and microseconds instead of
# seconds. Such values are wrong by orders of magnitude, and no other check would find them.
def _amount(value: float) -> float:
    if value < 1e6:
        raise ValueError("too small: give bytes or FLOP/s, such as 80e9, not GB or TFLOP/s")
    return value


def _delay(value: float) -> float:
    if value > 1:
        raise ValueError("too long: give seconds, such as 2e-6, not microseconds")
    return value


Amount = Annotated[PositiveNumber, AfterValidator(_amount)]
Delay = Annotated[NotNegative, AfterValidator(_delay)]
Triple = Annotated[tuple[PositiveNumber, PositiveNumber, PositiveNumber], Field(strict=False)]
