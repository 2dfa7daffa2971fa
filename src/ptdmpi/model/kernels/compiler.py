"""torch.compile of layers: by which backend, and what that needs of a machine."""

import importlib.util
import os
import shutil
from collections.abc import Callable

from ptdmpi.model.kernels import choice, host

BACKEND = "inductor"


def missing(device_type: str) -> str:
    """What the backend needs to compile for a device and this rank does not have, such as
    "triton"; empty: nothing. Loads nothing."""
    if BACKEND != "inductor":
        return ""
    if device_type == "cpu":
        found = shutil.which(os.environ.get("CXX", "g++")) is not None
        return "" if found else "C++ compiler (g++, or CXX)"
    if importlib.util.find_spec("triton") is None:
        return "triton"
    # triton compiles what launches its kernels
    names = (os.environ.get("CC", "cc"), "gcc", "clang")
    found = any(shutil.which(one) is not None for one in names)
    return "" if found else "C compiler (cc, or CC)"


def settle(constant: Callable[[Callable[..., object]], object]) -> None:
    """Tell a compiler, by `constant`, which questions a machine always answers alike."""
    for answer in (host.multiplies, host.adds_wide, host.has_flash, choice.usual_choice):
        constant(answer)
