"""The abilities of the processor and the devices of this rank. Each ability is looked up only once,
since it never changes on a machine."""

from collections.abc import Callable
from functools import cache, wraps
from typing import Any, ParamSpec, TypeVar

import torch

from ptdmpi.model.kernels.table import table

HALF_TYPES = (torch.bfloat16, torch.float16)
FUSED_TYPES = (torch.float32, torch.bfloat16)  # types of oneDNN's fused call for a linear
NATIVE = {
    torch.bfloat16: ("avx512_bf16", "amx_bf16"),
    torch.float16: ("avx512_fp16", "amx_fp16"),
}

P = ParamSpec("P")
R = TypeVar("R")


def asked_once(ask: Callable[P, R]) -> Callable[P, R]:
    """Return the function `ask` with a cache of its results. The result is a plain function,
    because a compiler would trace through `functools.cache` and warn about it."""
    known: Any = cache(ask)

    @wraps(ask)
    def answer(*arguments: P.args, **named: P.kwargs) -> R:
        """Return the result of `ask` for these arguments, which is computed only at the first
        call."""
        result: R = known(*arguments, **named)
        return result

    return answer


def vendor(device_type: str) -> str:
    """Return the kind of a device under its name in the table of kernels. torch uses the name
    "cuda" for AMD's devices too."""
    if device_type == "cuda" and torch.version.hip:
        return "rocm"
    return device_type


@asked_once
def multiplies(device_type: str, dtype: torch.dtype) -> bool:
    """Return True if this device multiplies numbers of a type without converting them to a wider
    type."""
    if device_type != "cpu" or dtype not in HALF_TYPES:
        return True
    capabilities = torch.cpu.get_capabilities()
    return any(capabilities.get(name, False) for name in NATIVE[dtype])


def has_fused() -> bool:
    """Return True if torch has oneDNN's fused call for a linear and its bias."""
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


@asked_once
def adds_wide(device_type: str) -> bool:
    """Return True if one kernel of this device adds a product of half types to a float32 sum."""
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    for entry in table()["weight_gradient"]:
        if entry["device"] == vendor(device_type) and version >= tuple(entry["torch"]):
            return bool(entry["way"] == "adds")
    return False


@asked_once
def has_flash(device_type: str) -> bool:
    """Return True if FlashAttention runs on this rank's devices of this kind. NVIDIA's devices
    support it from Ampere on."""
    if device_type != "cuda" or torch.version.hip:
        return True
    return bool(torch.cuda.get_device_capability() >= (8, 0))
