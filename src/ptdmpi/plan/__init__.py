"""The planning of a training run: process grid, pipeline schedules, simulated steps and pictures.

This package does not import torch, mpi4py or h5py. Matplotlib is imported only while a picture is
drawn.

`ptdmpi.plan` is also the name of a function of the Python API. As soon as a module of this package
is imported, Python binds the name to the package, so the package can be called like the function.
"""

import importlib
import sys
from types import ModuleType
from typing import Any


class _CallablePackage(ModuleType):
    """The package `ptdmpi.plan`, which can be called like the function `ptdmpi.plan`."""

    def __call__(self, *args: Any, **options: Any) -> Any:
        """Call `ptdmpi.plan.ask.layouts.plan`, and return its result."""
        return importlib.import_module("ptdmpi.plan.ask.layouts").plan(*args, **options)


sys.modules[__name__].__class__ = _CallablePackage
