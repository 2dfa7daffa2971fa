"""The preview of a run, for `ptdmpi train --dry-run` and `ptdmpi plan CONFIG`.

The preview needs no MPI, because its caller gives the number of ranks. The preview needs torch only
to find the memory of a GPU.
"""

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ptdmpi.base.disk import read_file
from ptdmpi.base.toml import tables_of
from ptdmpi.base.words import counted, file_size
from ptdmpi.checkpoint.base import base_told
from ptdmpi.config import Config, InputError
from ptdmpi.config.legality import dear
from ptdmpi.config.methods import stored_numbers
from ptdmpi.config.precision import PRECISIONS
from ptdmpi.config.presets import own_sizes
from ptdmpi.lineage.course import Course
from ptdmpi.lineage.trained_on import begun
from ptdmpi.plan.cost import relief
from ptdmpi.plan.cost.price import Price, Pricer
from ptdmpi.plan.cost.traffic import StepTraffic
from ptdmpi.plan.layout.reach import expert_lines
from ptdmpi.plan.shape.matrices import matrix_elements
from ptdmpi.plan.shape.parameters import parameter_count, trained_count
from ptdmpi.preview.first_samples import first_samples
from ptdmpi.preview.ranks import RankCount
from ptdmpi.preview.resume import resumed
from ptdmpi.report import trained
from ptdmpi.report.compare import cluster_of, pricer_of
from ptdmpi.report.status import BROKEN, Watched
from ptdmpi.train.capacity import expected_gpus, expected_sharing, rank_memory_bytes
from ptdmpi.train.checks import checked
from ptdmpi.train.feed import ShardSource, source_of

# Three tables for the function `timed`, which returns the keys that change the time of a step.
# UNTIMED_SECTIONS lists sections without such keys. UNTIMED_KEYS lists keys that do not change the
# time. In the sections of TIMED_KEYS, only the listed keys change the time.
UNTIMED_SECTIONS = ("checkpoint", "log")
UNTIMED_KEYS = {
    "adapt": {"base"},
    "optimizer": {
        "learning_rate",
        "min_learning_rate",
        "warmup_steps",
        "decay",
        "decay_steps",
        "beta1",
        "beta2",
        "eps",
        "weight_decay",
    },
    "precision": {"initial_loss_scale", "loss_scale_window"},
}
TIMED_KEYS = {
    "run": {"threads", "reproducible", "compile", "loss", "kernels", "verify_every"},
    "data": {"document_boundaries", "reader"},
}


def preview(
    tree: Mapping[str, Any], ranks: RankCount, cluster: str | None = None
) -> dict[str, Any]:
    """Return all facts that are known about the run before its start, as the dict that `--json`
    prints.

    If the run would not start on this machine, the entry "mistake" has the reason. `cluster` is a
    name or a file that replaces `run.cluster`. If the configuration has mistakes that do not depend
    on the machine, raise the InputError that the run would raise.
    """
    config = checked(tree, ranks.count, ranks.local or None)
    source = source_of(config)
    vocab_size = source.vocab_size
    course = Course(config, begun(config, source.train))
    resume = resumed(config, course)
    course.check()
    first = min(resume["step"], config.run.steps)
    named = cluster or cluster_of(Path(config.run.dir), config.model_dump())
    pricer = pricer_of(config, vocab_size, named) if named else None
    price = pricer.price(config.layout) if pricer else None
    room = _room(config, vocab_size, ranks, pricer)
    memory, checkpoint = _memory(room), _checkpoint(config, vocab_size)
    forecast: dict[str, Any] = {
        "run": config.run.name,
        "directory": config.run.dir,
        "ranks": ranks.count,
        "ranks_from": ranks.source,
        "layout": _layout(config),
        "warnings": [*_own_sizes(tree), *dear(config.layout, config.batch.global_size)],
        "precision": config.precision.compute,
        "experts": list(expert_lines(config.model, config.layout, _devices(ranks, pricer))),
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
        "remarks": list(source.remarks()),
        "has_shards": isinstance(source, ShardSource),
        "base": list(base_told(config)),
        "resume": resume,
        "memory": memory,
        "sent": _sent(config, vocab_size, first),
        "time": _time(config, price, config.run.steps - first),
        "checkpoint": checkpoint,
        "batch": first_samples(config, source, course, step=first, vocab_size=vocab_size),
    }
    if memory["fits"] is False:
        why = relief.explain(room.step, memory["capacity_bytes"])
        forecast["mistake"] = f"the model does not fit into memory\n{why}"
    elif not checkpoint["fits"]:
        forecast["mistake"] = (
            f"a checkpoint needs {file_size(checkpoint['bytes'])}, {config.run.dir} has "
            f"{file_size(checkpoint['free_bytes'])} free"
        )
    return forecast


def _own_sizes(tree: Mapping[str, Any]) -> list[str]:
    """Return a list with one line about the sizes in [model] that override the sizes of the preset.
    The list is empty if the section overrides none."""
    own = own_sizes(tree)
    if not own:
        return []
    values = ", ".join(f"{key} = {tree['model'][key]}" for key in own)
    preset = tree["model"]["preset"]
    return [f"model: {values} of the configuration replace those of preset {preset}"]


def _devices(ranks: RankCount, pricer: Pricer | None) -> int | None:
    """Return the number of ranks of a node. If a cluster is named, this is the number of devices of
    a node in the cluster. Otherwise, it is the number of ranks that were started on this host, or
    None if this number is unknown."""
    if pricer is not None:
        return pricer.cluster.node.devices
    return ranks.local or None


def _layout(config: Config) -> str:
    """Return a text about the layout of a configuration: the sizes of its axes and its settings."""
    layout = config.layout
    words = [str(layout), config.parallel.schedule]
    if layout.context > 1:
        words.append(f"context {layout.context_method}")
    if layout.sharding:
        words.append(layout.sharding)
    words.append(f"recompute {config.recompute.mode}")
    return ", ".join(words)


def _existing(path: Path) -> Path:
    """Return `path`, or the nearest directory above it that exists."""
    return next(place for place in (path, *path.absolute().parents) if place.exists())


def _drawn(course: Course, steps: int) -> list[dict[str, Any]]:
    """Return, for each training dataset, the number of samples that the complete run uses."""
    return [
        {
            "path": dataset.path,
            "samples": dataset.samples,
            "drawn": dataset.drawn,
            "epochs": dataset.drawn / dataset.samples,
        }
        for dataset in course.trained_on.last.drawn(course.order, steps)
    ]


@dataclass(frozen=True)
class _Room:
    """The memory that a step needs, and the memory that a rank has (None if it is unknown).

    `source` is a text that says where `capacity_bytes` comes from, for example from the cluster
    file.
    """

    step: relief.Step
    capacity_bytes: float | None
    source: str


def _room(config: Config, vocab_size: int, ranks: RankCount, pricer: Pricer | None) -> _Room:
    """Return the memory that a step needs, and the memory that a rank has. If a cluster is named,
    the memory of a rank is the memory of one of its devices. Otherwise this memory is known only if
    the ranks are started on this host. It is then the memory of a GPU, or, without a GPU, the
    memory of this host, divided by the number of ranks that share it."""
    on_host = True
    host_bytes = math.inf
    capacity_bytes = None
    source = "not known: set run.cluster, or start this command by mpirun, like the run"
    nodes = 1
    if ranks.local:
        nodes = math.ceil(ranks.count / ranks.local)
    if pricer is not None:
        nodes = math.ceil(ranks.count / pricer.cluster.node.devices)
        capacity_bytes = pricer.capacity_bytes
        source = "of the cluster"
        on_host = pricer.memory.on_host
        host_bytes = pricer.host_capacity_bytes
    elif ranks.local:
        import torch

        capacity_bytes, source = _here(ranks.local)
        on_host = not torch.cuda.is_available()
        if not on_host:
            host_bytes = rank_memory_bytes(torch.device("cpu"), ranks.local)
    step = relief.Step.of(config, vocab_size, on_host=on_host, nodes=nodes)
    return _Room(replace(step, host_capacity_bytes=host_bytes), capacity_bytes, source)


def _memory(room: _Room) -> dict[str, Any]:
    """Return the memory of each rank, and the memory that a step needs on the rank that needs the
    most, both in bytes. "fits" is None if the memory of a rank is unknown."""
    rank, need = room.step.largest()
    on_hosts = room.step.on_hosts()
    fits = None
    if room.capacity_bytes is not None:
        on_device = need.total <= room.capacity_bytes
        fits = on_device and on_hosts <= room.step.host_capacity_bytes
    return {
        "pipeline_rank": rank,
        "parts_bytes": {name: n for name, n in need.parts.items() if n or name != "runtime"},
        "bytes": need.total,
        "host_bytes": on_hosts,
        "capacity_bytes": room.capacity_bytes,
        "capacity_from": room.source,
        "fits": fits,
    }


def _sent(config: Config, vocab_size: int, step: int) -> dict[str, Any]:
    """Return the number and the bytes of the messages that rank 0 sends in `step` (counted from 0),
    computed from closed forms.

    The entry "traffic" maps group of ranks -> kind of message -> {"messages", "bytes"}. The entry
    "is_exact" is False if compressed gradients are sent, because the closed form of their length is
    exact only for large matrices. It is also False if tokens are sent to experts on other ranks,
    because the numbers of these tokens are not known in advance.
    """
    traffic = StepTraffic.of_config(config, vocab_size)
    return {"traffic": traffic.of(rank=0, step=step).by_kind, "is_exact": traffic.is_exact}


def _here(local_ranks: int) -> tuple[int, str]:
    """Return the memory of a rank in bytes, on a GPU of this host or, without a GPU, on the host
    itself. Also return a text that says how many ranks share this memory."""
    import torch

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    ranks = counted(local_ranks, "rank")
    source = f"of this host, shared by {ranks}"
    if device.type != "cpu":
        gpus = counted(expected_gpus(device), "GPU")
        source = f"of a GPU of this host, {ranks} sharing the {gpus} that it shows"
    return rank_memory_bytes(device, expected_sharing(device, local_ranks)), source


def _time(config: Config, price: Price | None, steps: int) -> dict[str, Any]:
    """Return the time of one step and of the remaining `steps`. If a cluster is named, the step
    time is predicted for this cluster. If no cluster is named, the step time is the measured time
    of earlier steps of this run. These measurements are used only if the newest step was trained
    with the same values of all keys that change the step time (`timed`). In all other cases the
    step time is None."""
    step_s = None
    source = "not known: ptdmpi probe measures a machine for run.cluster"
    if price is not None:
        step_s = price.step_time_s
        source = "predicted"
    elif (Path(config.run.dir) / "metrics.jsonl").is_file():
        path = Path(config.run.dir)
        status = _status(path)
        same_layout = status.get("rank_count") and status["layout"] == str(config.layout)
        if same_layout and _settings_at(path, status["step"]) == timed(config):
            step_s = status["step_time_s"]
            source = "as measured in this run"
    total = None if step_s is None else steps * step_s
    return {"step_s": step_s, "from": source, "steps": steps, "total_s": total}


def timed(config: Config) -> dict[str, Any]:
    """Return the values of all keys that change the time of a step, as section -> key -> value."""
    return {
        name: getattr(config, name).model_dump(
            include=TIMED_KEYS.get(name), exclude=UNTIMED_KEYS.get(name)
        )
        for name in Config.sections()
        if name not in UNTIMED_SECTIONS
    }


def _settings_at(path: Path, step: int) -> dict[str, Any] | None:
    """Find the configuration with which the run in the directory `path` trained `step`. Return the
    result of `timed` for this configuration, or None if it cannot be read."""
    try:
        history = trained.trained_steps(path, [{"step": step}])
        newest = tables_of(read_file(path / "config.toml"))
        return timed(trained.resolved(trained.config_at(history, step, newest)))
    except (*BROKEN, InputError):
        return None


def _status(path: Path) -> dict[str, Any]:
    """Return the status of a run (see `Watched.status`); an empty table if `path` is not a run
    directory."""
    try:
        return Watched(path).status()
    except InputError:
        return {}


def stored_bytes(config: Config, vocab_size: int) -> int:
    """Return the size of the tensors of a checkpoint in bytes."""
    element = PRECISIONS[config.precision.compute].master.bytes
    model = config.model
    moments = config.optimizer.numbers
    numbers = stored_numbers(config.data_parallel, moments, config.data_size)
    size = numbers * element * trained_count(model, vocab_size)
    if config.optimizer.has_matrices:  # Muon stores one moment fewer for matrices
        fewer = stored_numbers(config.data_parallel, moments - 1, config.data_size)
        size -= (numbers - fewer) * element * matrix_elements(model)
    return size


def _checkpoint(config: Config, vocab_size: int) -> dict[str, Any]:
    """Return the size of a checkpoint, the free space on its disk, and the number of steps and of
    minutes between two checkpoints."""
    size = stored_bytes(config, vocab_size)
    disk = os.statvfs(_existing(Path(config.run.dir)))
    free = disk.f_bavail * disk.f_frsize
    return {
        "bytes": size,
        "free_bytes": free,
        "fits": size <= free,
        "every_steps": config.checkpoint.every_steps,
        "every_minutes": config.checkpoint.every_minutes,
    }
