"""What torchtitan asks for where it is imported, and is not there on a machine without a GPU."""

import sys
import types

import torch


class _Kernels(types.ModuleType):
    """Kernels of a language that is not there; nobody calls them."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


def for_torchtitan() -> None:
    """Have the CPU answer where a device is asked for, in this process from now on."""
    torch._utils._get_available_device_type = lambda: "cpu"
    # in Triton, and of expert parallelism, which no row has
    kernels = "torchtitan.distributed.minimal_async_ep.kernels"
    sys.modules[kernels] = _Kernels(kernels)
