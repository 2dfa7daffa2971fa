"""Numbers of data sheets, bounded so that a slip of units is caught."""

from typing import Annotated

from pydantic import AfterValidator, Field

# not strict: TOML tells 2 from 2.0, and people who write a data sheet do not
PositiveNumber = Annotated[float, Field(gt=0, strict=False)]
NotNegative = Annotated[float, Field(ge=0, strict=False)]


# The two slips that a data sheet invites, GB for bytes and microseconds for seconds, would pass any
# other check and be a thousand times off.
def _amount(value: float) -> float:
    if value < 1e6:
        raise ValueError("too little; in bytes and FLOPs, such as 80e9, not in GB and TFLOPs")
    return value


def _delay(value: float) -> float:
    if value > 1:
        raise ValueError("too long; in seconds, such as 2e-6, not in microseconds")
    return value


Amount = Annotated[PositiveNumber, AfterValidator(_amount)]
Delay = Annotated[NotNegative, AfterValidator(_delay)]
Triple = Annotated[tuple[PositiveNumber, PositiveNumber, PositiveNumber], Field(strict=False)]
