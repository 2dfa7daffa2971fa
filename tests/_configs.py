"""Small configurations for tests: a tree of defaults with changed keys."""

import copy
from collections.abc import Mapping
from typing import Any

from ptdmpi.config import Config, resolve
from ptdmpi.config.kinds import LayerKind, LayerRun, Runs

SMALL = {
    "run": {"steps": 5},
    "model": {"layers": 3, "hidden": 32, "heads": 4, "seq_length": 16},
    "batch": {"global_size": 8, "micro_size": 2},
    # rates at which five steps move every weight visibly
    "optimizer": {"learning_rate": 3e-3, "warmup_steps": 2},
    "data": {"train": [{"path": "unused"}]},
}

Changes = Mapping[str, Any]


def tree(changes: Changes | None = None) -> dict[str, dict[str, Any]]:
    """Return the tree of `SMALL` with `changes`, as {"model.layers": 3}; None removes a key."""
    changed: dict[str, dict[str, Any]] = copy.deepcopy(SMALL)
    for key, value in (changes or {}).items():
        section, name = key.split(".")
        keys = changed.setdefault(section, {})
        keys.pop(name, None)
        if value is not None:
            keys[name] = value
    return changed


def small(changes: Changes | None = None, ranks: int = 1) -> Config:
    """Return the configuration of a small GPT on `ranks` ranks."""
    return resolve(tree(changes), ranks)


def alike(layers: int) -> Runs:
    """Return the runs of a model whose layers are alike, and have no experts."""
    return (LayerRun(LayerKind(), layers),)


def layout(t: int = 1, p: int = 1, v: int = 1, d: int = 1) -> dict[str, int]:
    """Return the changes that select a layout of t p d ranks."""
    return {
        "parallel.tensor": t,
        "parallel.pipeline": p,
        "parallel.virtual": v,
        "parallel.data": d,
    }
