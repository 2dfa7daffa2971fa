"""The options of `ptdmpi init`. This module imports nothing large, so that the help of the command
appears at once."""

from dataclasses import dataclass
from pathlib import Path

SMALL = "l=4,h=128,a=4,s=128"  # The default model, which trains in minutes on a laptop.


@dataclass(frozen=True)
class Wish:
    """The options of `ptdmpi init`, and the properties of the machine.

    `memory_bytes` is the memory of a rank; it is used only if no cluster is named. `adapt` is the
    path of a frozen model for which the run trains adapters. If both `model` and `adapt` are None,
    the model is SMALL. If `steps` is None, the run trains for one epoch, but for at most
    `draft.MOST_STEPS` steps.
    """

    file: Path
    data: Path
    ranks: int
    memory_bytes: int
    model: str | None = None
    adapt: Path | None = None
    on_gpu: bool = False
    valid: Path | None = None
    cluster: str | None = None
    name: str | None = None
    steps: int | None = None
