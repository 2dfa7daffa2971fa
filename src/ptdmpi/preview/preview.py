"""What a configuration would do here: `ptdmpi train --dry-run` and `ptdmpi plan CONFIG`.

Without MPI: the number of ranks is a number. Torch is asked for the memory of a GPU alone.
"""

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ptdmpi.base.words import counted, file_size
from ptdmpi.checkpoint import directory as files
from ptdmpi.checkpoint.base import base_told
from ptdmpi.checkpoint.examine import newest
from ptdmpi.checkpoint.manifest import sound_manifest
from ptdmpi.config import Config, DataParallelConfig, InputError
from ptdmpi.config.legality import dear
from ptdmpi.config.methods import stored_numbers
from ptdmpi.config.precision import PRECISIONS
from ptdmpi.lineage.course import Course
from ptdmpi.lineage.trained_on import begun
from ptdmpi.plan.cost import relief
from ptdmpi.plan.cost.price import Price, Pricer
from ptdmpi.plan.layout.topology import file_ranks
from ptdmpi.plan.shape.matrices import matrix_elements
from ptdmpi.plan.shape.parameters import parameter_count
from ptdmpi.preview import text
from ptdmpi.report.compare import cluster_of, pricer_of
from ptdmpi.report.status import Watched
from ptdmpi.train.capacity import expected_gpus, expected_sharing, rank_memory_bytes
from ptdmpi.train.checks import checked
from ptdmpi.train.feed import source_of
from ptdmpi.train.standing import standing_of


@dataclass(frozen=True)
class RankCount:
    """How many ranks, why so many, and how many of them share this host; 0: not known."""

    count: int
    source: str
    local: int


def preview(
    tree: Mapping[str, Any], ranks: RankCount, cluster: str | None = None
) -> dict[str, Any]:
    """Everything that is known before the start; "mistake" says what keeps the run from it.

    `cluster` by name or file: instead of `run.cluster`. Raises InputError as the run would, for
    whatever does not depend on the machine.
    """
    config = checked(tree, ranks.count, ranks.local or None)
    source = source_of(config)
    vocab_size = source.vocab_size
    course = Course(config, begun(config, source.train))
    resumed = _resumed(config, course)
    course.check()
    first = min(resumed["step"], config.run.steps)
    named = cluster or cluster_of(Path(config.run.dir), config.model_dump())
    pricer = pricer_of(config, vocab_size, named) if named else None
    price = pricer.price(config.layout) if pricer else None
    step, capacity_bytes, whose = _room(config, vocab_size, ranks, pricer)
    found: dict[str, Any] = {
        "run": config.run.name,
        "directory": config.run.dir,
        "ranks": ranks.count,
        "ranks_from": ranks.source,
        "layout": _layout(config),
        "warnings": list(dear(config.layout, config.batch.global_size)),
        "precision": config.precision.compute,
        "parameters": parameter_count(config.model, vocab_size),
        "vocab_size": vocab_size,
        "steps": config.run.steps,
        "tokens_per_step": config.batch.global_size * config.model.seq_length,
        "tokens": course.tokens(config.run.steps),
        "train": _drawn(course, config.run.steps),
        "valid": [
            {"path": path, "samples": dataset.samples(config.model.text_length)}
            for path, dataset in zip(config.data.valid_paths, source.valid, strict=True)
        ],
        "told": list(source.remarks()),
        "base": list(base_told(config)),
        "resume": resumed,
        "memory": _memory(step, capacity_bytes, whose),
        "time": _time(config, price, config.run.steps - first),
        "checkpoint": _checkpoint(config, vocab_size),
        "batch": text.samples(config, source, course, first, vocab_size),
    }
    memory = found["memory"]
    if memory["fits"] is False:
        explained = relief.explain(step, memory["capacity_bytes"])
        found["mistake"] = f"the model does not fit into memory\n{explained}"
    elif not found["checkpoint"]["fits"]:
        checkpoint = found["checkpoint"]
        found["mistake"] = (
            f"a checkpoint needs {file_size(checkpoint['bytes'])}, {config.run.dir} has "
            f"{file_size(checkpoint['free_bytes'])} free"
        )
    return found


def _layout(config: Config) -> str:
    parallel, layout = config.parallel, config.layout
    sharded = f"{layout.sharding}, " if layout.sharding else ""
    return f"{layout}, {parallel.schedule}, {sharded}recompute {config.recompute.mode}"


def _existing(path: Path) -> Path:
    """The directory itself, or what there is above it."""
    return next(one for one in (path, *path.absolute().parents) if one.exists())


def _resumed(config: Config, course: Course) -> dict[str, Any]:
    """From which checkpoint the run would go on, what has changed since, and what happens to those
    that are there. Raises InputError if it may not go on."""
    own, wanted = Path(config.run.dir) / "checkpoints", config.checkpoint.resume
    there = files.checkpoints_in(own)
    if wanted == "never" or (wanted == "auto" and not there):
        said = "begins anew"
        if there:
            said += f"; the {counted(len(there), 'checkpoint')} of {own} will be set aside"
        elif config.checkpoint.initial:
            said += f", from the weights of {newest(Path(config.checkpoint.initial))}"
        return {"step": 0, "path": None, "changed": [], "says": said}
    named = Path(wanted) if wanted != "auto" else own
    if wanted != "auto" and files.went_on_from(own, files.named(named)):
        named = own
    path = newest(named)
    manifest = sound_manifest(path)
    course.judge("resume", path, manifest.said)
    step, changed = manifest.progress.step, list(course.answer.changed)
    if step >= config.run.steps and named != own:
        raise InputError(
            f"checkpoint.resume = {wanted}: {step} steps are trained, and run.steps = "
            f"{config.run.steps}: nothing is left to do; legal: run.steps above {step}"
        )
    said = f"resumes after step {step} from {path}"
    if step >= config.run.steps:
        said = (
            f"has nothing to train: {path} has {counted(step, 'step')}; legal: run.steps above "
            f"{step}, or another run.name"
        )
    elif named == own and (over := standing_of(config, step).over):
        said = (
            f"is over, stopped early after step {step}: {over}; legal: a higher "
            "run.stop_after_worse, or 0, or another run.name"
        )
    if changed:
        said += f"; changed since: {', '.join(changed)}"
    if config.checkpoint.initial:
        said += "; checkpoint.initial is not used"
    return {"step": step, "path": str(path), "changed": changed, "says": said}


def _drawn(course: Course, steps: int) -> list[dict[str, Any]]:
    """What the whole run takes of each training dataset."""
    return [
        {
            "path": one.path,
            "samples": one.samples,
            "drawn": one.drawn,
            "epochs": one.drawn / one.samples,
        }
        for one in course.trained_on.last.drawn(course.order, steps)
    ]


def _room(
    config: Config, vocab_size: int, ranks: RankCount, pricer: Pricer | None
) -> tuple[relief.Step, float | None, str]:
    """(the memory of the run, what a rank has of it, whose that is): on the cluster, else on this
    host where the ranks are known to be on it."""
    on_host, host_bytes, capacity = True, math.inf, None
    source = "not known: give --cluster, or start it by mpirun as the run"
    if pricer is not None:
        capacity, source = pricer.capacity_bytes, "of the cluster"
        on_host, host_bytes = pricer.memory.on_host, pricer.host_capacity_bytes
    elif ranks.local:
        import torch

        capacity, source = _here(ranks.local)
        on_host = not torch.cuda.is_available()
        if not on_host:
            host_bytes = rank_memory_bytes(torch.device("cpu"), ranks.local)
    step = relief.Step.of(config, vocab_size, on_host=on_host)
    return replace(step, host_capacity_bytes=host_bytes), capacity, source


def _memory(step: relief.Step, capacity: float | None, source: str) -> dict[str, Any]:
    """What the fullest rank needs, beside what it has. "fits" is None where that is not known."""
    rank, need = step.largest()
    parts = {name: n for name, n in need.parts.items() if n or name != "runtime"}
    on_hosts = step.on_hosts() <= step.host_capacity_bytes
    return {
        "pipeline_rank": rank,
        "parts_bytes": parts,
        "bytes": need.total,
        "capacity_bytes": capacity,
        "capacity_from": source,
        "fits": None if capacity is None else on_hosts and need.total <= capacity,
    }


def _here(local_ranks: int) -> tuple[int, str]:
    """What a rank has of this host or its GPUs, and by which reckoning."""
    import torch

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    ranks = counted(local_ranks, "rank")
    source = f"of this host, shared by {ranks}"
    if device.type != "cpu":
        gpus = counted(expected_gpus(device), "GPU")
        source = f"of a GPU of this host, {ranks} sharing the {gpus} that it shows"
    return rank_memory_bytes(device, expected_sharing(device, local_ranks)), source


def _time(config: Config, price: Price | None, steps: int) -> dict[str, Any]:
    """A step's time as the cluster file foresees it, else as this run took it before."""
    step_s, source = None, "not known: ptdmpi probe measures a machine for run.cluster"
    if price is not None:
        step_s, source = price.step_time_s, "predicted"
    elif (Path(config.run.dir) / "metrics.jsonl").is_file():
        status = _status(Path(config.run.dir))
        if status.get("rank_count") and status["layout"] == _layout(config).partition(", ")[0]:
            step_s, source = status["step_time_s"], "as the run took before"
    total = None if step_s is None else steps * step_s
    return {"step_s": step_s, "from": source, "steps": steps, "total_s": total}


def _status(path: Path) -> dict[str, Any]:
    try:
        return Watched(path).status()
    except InputError:
        return {}


def _checkpoint(config: Config, vocab_size: int) -> dict[str, Any]:
    """Its size, and how often one is written."""
    element = PRECISIONS[config.precision.compute].master.bytes
    moments, model = config.optimizer.numbers, config.model
    told = (config.data_parallel, moments, config.data_size)
    size = stored_numbers(*told) * element * parameter_count(model, vocab_size)
    if config.optimizer.has_matrices:  # of which one number less is kept
        less = stored_numbers(*told) - stored_numbers(told[0], moments - 1, told[2])
        size -= less * element * model.layers * matrix_elements(model, 1)
    there = os.statvfs(_existing(Path(config.run.dir)))
    free = there.f_bavail * there.f_frsize
    return {
        "bytes": size,
        "free_bytes": free,
        "fits": size <= free,
        "every_steps": config.checkpoint.every_steps,
        "every_minutes": config.checkpoint.every_minutes,
    }


def needed_ranks(tree: Mapping[str, Any]) -> tuple[int, bool]:
    """(how many ranks a configuration speaks of, whether it takes no others); d counts as 1 where
    it is what remains, or as what a file of edges is over."""

    def whole(section: str, key: str, default: int) -> int:
        keys = tree.get(section)
        value = keys.get(key, default) if isinstance(keys, Mapping) else default
        return value if type(value) is int and value > 0 else default

    sizes = [whole("parallel", key, 1) for key in ("tensor", "pipeline")]
    data = whole("parallel", "data", 0)
    ranks = sizes[0] * sizes[1] * (data or _graph_ranks(tree)) + whole("run", "spare_ranks", 0)
    return ranks, data > 0


def _graph_ranks(tree: Mapping[str, Any]) -> int:
    """What is wrong with the section, or its file, is told by whoever checks it."""
    try:
        return file_ranks(DataParallelConfig.model_validate(tree.get("data_parallel", {}))) or 1
    except (InputError, ValueError):
        return 1
