"""The use of torch.compile for layers: its backend, and the tools that it needs on a machine."""

import importlib.util
import os
import shutil
from collections.abc import Callable

from ptdmpi.model.kernels import choice, host

BACKEND = "inductor"


def missing(device_type: str) -> str:
    """Return the name of a tool, such as "triton", that torch.compile needs for a device and that
    this rank lacks. Return "" if no tool is missing. This function searches for packages without
    importing them."""
    if BACKEND != "inductor":
        return ""
    if device_type == "cpu":
        if shutil.which(os.environ.get("CXX", "g++")) is None:
            return "C++ compiler (g++, or CXX)"
        return ""
    return missing_for_triton()


def missing_for_triton() -> str:
    """Return the name of a tool that kernels in Triton need on a device and that this rank lacks.
    Return "" if no tool is missing. This function imports no package."""
    if importlib.util.find_spec("triton") is None:
        return "triton"
    # triton needs a C compiler for the code that launches its kernels
    names = (os.environ.get("CC", "cc"), "gcc", "clang")
    if all(shutil.which(name) is None for name in names):
        return "C compiler (cc, or CC)"
    return ""


def settle(constant: Callable[[Callable[..., object]], object]) -> None:
    """Tell torch's compiler that some functions always return the same result on this machine.
    `constant` is the function of torch that declares this for one function."""
    for answer in (host.multiplies, host.adds_wide, host.has_flash, choice.usual_choice):
        constant(answer)
