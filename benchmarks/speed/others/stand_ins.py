"""Stand-ins for modules that torchtitan imports but that a machine without a GPU does not have."""

import sys
import types

import torch


class _Kernels(types.ModuleType):
    """A stand-in for a module of Triton kernels, which no row of the benchmark calls."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


def for_torchtitan() -> None:
    """Make the CPU the device that torchtitan finds in this process."""
    torch._utils._get_available_device_type = lambda: "cpu"
    # torchtitan imports these Triton kernels of its expert parallelism. torch for CPUs does not
    # have Triton. A stand-in is enough, because no row of the benchmark calls the kernels.
    kernels = "torchtitan.distributed.minimal_async_ep.kernels"
    sys.modules[kernels] = _Kernels(kernels)
