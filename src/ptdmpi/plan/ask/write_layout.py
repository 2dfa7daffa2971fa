"""The layout that `ptdmpi plan` chose, as a configuration of `ptdmpi train`."""

import math
from pathlib import Path
from typing import Any

from ptdmpi.base.disk import write_whole
from ptdmpi.base.errors import InputError
from ptdmpi.base.say import note
from ptdmpi.base.words import counted
from ptdmpi.config import resolve
from ptdmpi.plan.ask.layouts import LayoutPlan, LayoutRequest
from ptdmpi.plan.cost.relief import size
from ptdmpi.plan.machine.cluster import model_section

STEPS = 1000  # number of steps if the request does not say how many tokens to train on
DATA = "data/train"


def check(file: Path, request: LayoutRequest) -> None:
    """Raise InputError if the plan could not be written to `file`. Call this function before the
    search, which may take long."""
    if file.exists():
        raise InputError(f"{file} exists already; give --write another name")
    if request.dp_overlap:
        raise InputError(
            "--write: ptdmpi train overlaps no messages over the data axis with computation, so "
            "leave out --dp-overlap"
        )
    if request.lora is not None:
        raise InputError(
            "--write: adapters need a base, so leave out --lora (docs/how-to/fine-tuning.md)"
        )


def write(file: Path, request: LayoutRequest, plan: LayoutPlan) -> None:
    """Write a complete configuration with the plan's first layout, and print the command that
    checks this configuration.

    The number of steps follows from the number of tokens in the request. Without this number, it is
    `STEPS`. The training data is the placeholder `DATA`, which the user must replace. Raise
    InputError if the layout does not fit, or the file cannot be written.
    """
    best = plan.numbers["layouts"][0]
    memory = f"{size(best['peak_memory_bytes'])} of {size(best['capacity_bytes'])} per rank"
    if not best["fits"]:
        raise InputError(f"--write {file}: the layout {plan.layout} does not fit: {memory}")
    ranks = plan.numbers["ranks"]
    tree = _tree(file, request, plan)
    resolve(tree, ranks)
    import tomlkit

    start = f"mpirun -n {ranks} ptdmpi train {file}"
    head = (
        f"# {request.model} on {counted(ranks, 'rank')} of {plan.pricer.cluster.name}, as ptdmpi "
        f"plan chose it:\n# a step of {best['step_time_s']:.3g} s, {memory}.\n"
        f"# {start} --dry-run  checks it\n# {start}            trains\n"
        f"# Adapt [run] steps and the data. docs/reference/configuration.md has every key.\n\n"
    )
    try:
        write_whole(file, head + tomlkit.dumps(tree))
    except OSError as error:
        raise InputError(f"{file}: {error.strerror}") from None
    note(f"ptdmpi plan: wrote {file}; next: {start} --dry-run")


def _tree(file: Path, request: LayoutRequest, plan: LayoutPlan) -> dict[str, Any]:
    """Return the configuration for the first layout of `plan` as a dict: section -> keys. The run
    has the name of `file`, without its suffix."""
    steps = STEPS
    if request.tokens is not None:
        steps = math.ceil(request.tokens / (plan.numbers["batch"] * plan.numbers["seq_length"]))
    return {
        "run": {"name": file.stem, "steps": steps, "cluster": request.cluster},
        "model": model_section(request.model),
        **{name: keys for name, keys in plan.numbers["train"].items() if name != "model"},
        "data": {"train": [{"path": DATA}]},
    }
