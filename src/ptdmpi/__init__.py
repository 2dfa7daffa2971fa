"""A program that trains large language models over MPI, with the method PTD-P (Narayanan et al.
2021, arXiv 2104.04473).

From Python: `Run` trains, `load` opens a trained model, `plan` predicts the time and memory of
layouts, `open_shards` reads token shards. Each of these names is imported only when it is first
used, so `plan` can be used without torch and MPI.
"""

from __future__ import annotations

import importlib

# `typing` is not imported at run time, because a Ctrl-C during its import could not be handled
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from ptdmpi.base.errors import InputError
    from ptdmpi.generate.loaded import LoadedModel, load
    from ptdmpi.inference.windows import TokenWindows, open_shards
    from ptdmpi.plan.ask.layouts import plan
    from ptdmpi.train.hooks import Hook
    from ptdmpi.train.run import Run

__version__ = "0.3.0"
__all__ = [
    "Hook",
    "InputError",
    "LoadedModel",
    "Run",
    "TokenWindows",
    "load",
    "open_shards",
    "plan",
]

# maps each name of the Python API to the module that defines it
_OWNERS = {
    "Hook": "ptdmpi.train.hooks",
    "InputError": "ptdmpi.base.errors",
    "LoadedModel": "ptdmpi.generate.loaded",
    "Run": "ptdmpi.train.run",
    "TokenWindows": "ptdmpi.inference.windows",
    "load": "ptdmpi.generate.loaded",
    "open_shards": "ptdmpi.inference.windows",
    "plan": "ptdmpi.plan.ask.layouts",
}


def __getattr__(name: str) -> Any:
    """Return the object called `name` from the module that defines it. This call imports that
    module. Before the import, it sets the environment variables that MPI and torch need."""
    if name not in _OWNERS:
        raise AttributeError(f"module 'ptdmpi' has no attribute {name!r}")
    importlib.import_module("ptdmpi.comm.launch").prepare()
    return getattr(importlib.import_module(_OWNERS[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
