"""The abilities of this rank's processor and devices, for example whether they multiply 16-bit
numbers, and the table of measurements that says which kernels are the fastest. Each ability is
determined only once, because the abilities of a machine never change."""

import tomllib
from collections.abc import Callable
from functools import cache, wraps
from importlib.resources import files
from typing import Any, ParamSpec, TypeVar

import torch

HALF_TYPES = (torch.bfloat16, torch.float16)
# types that oneDNN's fused call for a linear supports
FUSED_TYPES = (torch.float32, torch.bfloat16)
SIZE_TRIED = 16  # rows and columns of the operands with which the fused call is tried
NATIVE = {
    torch.bfloat16: ("avx512_bf16", "amx_bf16"),
    torch.float16: ("avx512_fp16", "amx_fp16"),
}

P = ParamSpec("P")
R = TypeVar("R")


def asked_once(ask: Callable[P, R]) -> Callable[P, R]:
    """Return the function `ask` with a cache of its results. The returned function is a plain
    Python function that calls the cached one, because torch's compiler would print a warning for a
    function of `functools.cache`."""
    known: Any = cache(ask)

    @wraps(ask)
    def answer(*arguments: P.args, **named: P.kwargs) -> R:
        """Return the result of `ask` for the given arguments. The result is computed only at the
        first call with these arguments."""
        result: R = known(*arguments, **named)
        return result

    return answer


@cache
def table() -> dict[str, Any]:
    """Return the measurements in presets/kernels.toml, which determine the fastest kernels: kind of
    kernel -> list of entries. The first entry that fits the machine is used."""
    text = files("ptdmpi").joinpath("presets", "kernels.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


def vendor(device_type: str) -> str:
    """Return the name that the table of kernels uses for a type of device. For AMD's devices, which
    torch calls "cuda", this name is "rocm"."""
    if device_type == "cuda" and torch.version.hip:
        return "rocm"
    return device_type


@asked_once
def multiplies(device_type: str, dtype: torch.dtype) -> bool:
    """Return True if this device multiplies numbers of the type `dtype` without converting them to
    a wider type."""
    if device_type != "cpu" or dtype not in HALF_TYPES:
        return True
    capabilities = torch.cpu.get_capabilities()
    return any(capabilities.get(name, False) for name in NATIVE[dtype])


@asked_once
def has_fused(dtype: torch.dtype) -> bool:
    """Return True if this host computes oneDNN's fused call for a linear and its bias with operands
    of the type `dtype`. This function makes such a call to see if it succeeds. The processor alone
    does not determine the result: a user may limit the instructions that oneDNN uses (by the
    environment variable ONEDNN_MAX_CPU_ISA), and then oneDNN lacks some types."""
    if dtype not in FUSED_TYPES or not torch.backends.mkldnn.is_available():
        return False
    operand = torch.zeros(SIZE_TRIED, SIZE_TRIED, dtype=dtype)
    try:
        torch.ops.mkldnn._linear_pointwise(operand, operand, operand[0], "none", [], "")
    except (AttributeError, RuntimeError):
        return False
    return True


@asked_once
def adds_wide(device_type: str) -> bool:
    """Return True if this device has a kernel that adds a matrix product of 16-bit operands to a
    float32 sum."""
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    for entry in table()["weight_gradient"]:
        if entry["device"] == vendor(device_type) and version >= tuple(entry["torch"]):
            return bool(entry["way"] == "adds")
    return False


@asked_once
def has_flash(device_type: str) -> bool:
    """Return True if FlashAttention runs on this rank's devices of the type `device_type`. NVIDIA's
    devices support FlashAttention from the Ampere generation on. For devices of other vendors, and
    for the CPU, the result is always True."""
    if device_type != "cuda" or torch.version.hip:
        return True
    return bool(torch.cuda.get_device_capability() >= (8, 0))


def multiplies_codes(device: torch.device) -> bool:
    """Return True if a device multiplies 8-bit floating-point numbers. NVIDIA GPUs do from compute
    capability 8.9 on (Ada, Hopper and later)."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 9)
