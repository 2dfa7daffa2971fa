"""All that can be wrong with a run before memory is allocated, found by one rank for everyone, and
told in one round."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from ptdmpi.checkpoint.base import base_at, form_at
from ptdmpi.config import (
    AdaptConfig,
    Config,
    DataConfig,
    InputError,
    LogConfig,
    ModelConfig,
    QuantizeConfig,
    RunConfig,
    TaskConfig,
    resolve,
)
from ptdmpi.config.adapt import WHOLE
from ptdmpi.config.files import parsed
from ptdmpi.config.section import Section
from ptdmpi.data.shards import Dataset
from ptdmpi.evaluate import tasks
from ptdmpi.evaluate.labelled import items
from ptdmpi.lineage.course import Course
from ptdmpi.lineage.judge import FROM_HERE
from ptdmpi.lineage.trained_on import begun
from ptdmpi.plan.layout.topology import topology_of
from ptdmpi.plan.machine.cluster import load_cluster
from ptdmpi.plan.shape.low_bit import LowBit
from ptdmpi.sinks.sinks import require
from ptdmpi.train.feed import source_of
from ptdmpi.train.task_files import task_files


def checked(tree: Mapping[str, Any], ranks: int, node_ranks: int | None = None) -> Config:
    """The configuration of a run on `ranks` ranks, `node_ranks` on a node, with data, cluster,
    tasks and run directory that can be used; nothing is written. Raises InputError with all
    mistakes, a line each."""
    tree = with_form(tree)
    try:
        config = resolve(tree, ranks, node_ranks)
    except InputError as error:
        sections, _, _ = parsed(tree)
        raise InputError("\n".join([str(error), *_told(_apart(sections))])) from None
    checked_data(config)
    return config


def with_form(tree: Mapping[str, Any]) -> Mapping[str, Any]:
    """A configuration with [quantize] as its frozen base says of itself, where neither it says that
    nor is wrong: of a base that cannot be read others speak."""
    adapt, quantize = (tree.get(name, {}) for name in ("adapt", "quantize"))
    known = isinstance(adapt, Mapping) and isinstance(quantize, Mapping)
    if not known or "weights" in quantize or adapt.get("method", "none") in WHOLE:
        return tree
    base = adapt.get("base")
    try:
        form = form_at(Path(base)) if base and isinstance(base, str) else None
    except InputError:
        return tree
    if form is None:
        return tree
    return {**tree, "quantize": {"block": form.block, **quantize, "weights": form.codes}}


def checked_data(config: Config) -> int:
    """The size of the vocabulary, of data that go together and are enough, with a cluster, tasks
    and a run directory that can be used. Raises InputError with all mistakes, a line each."""
    mistakes = _told(_apart({name: getattr(config, name) for name in Config.model_fields}))
    if mistakes:
        raise InputError("\n".join(mistakes))
    if config.data_parallel.method == "decentralized":
        topology_of(config)  # which the course of the run has, too
    source = source_of(config)
    course = Course(config, begun(config, source.train))
    if config.data.change != FROM_HERE:  # else it counts from where the run stands
        mistakes += _told([course.check])
    mistakes += _told([partial(task_files, config, course, source.vocab_size)])
    if mistakes:
        raise InputError("\n".join(mistakes))
    return source.vocab_size


def _told(checks: Iterable[Callable[[], object]]) -> list[str]:
    """What those of some checks say that fail, each line once."""
    found: list[str] = []
    for check in checks:
        try:
            check()
        except InputError as error:
            found += str(error).splitlines()
    return list(dict.fromkeys(found))


def _apart(sections: Mapping[str, Section]) -> Iterator[Callable[[], object]]:
    """What can be asked of a section for itself, whatever is wrong with others."""
    run, data, log = (sections.get(name) for name in ("run", "data", "log"))
    if isinstance(run, RunConfig):
        yield partial(require_writable, Path(run.dir))
        if run.cluster:
            yield partial(load_cluster, run.cluster)
    if isinstance(data, DataConfig):
        model, task = sections.get("model"), sections.get("task")
        for path in dict.fromkeys((*(part.path for part in data.train), *data.valid_paths)):
            if isinstance(task, TaskConfig) and task.kind != "none":
                yield partial(items, Path(path), task)
            else:
                yield partial(_dataset, path, model if isinstance(model, ModelConfig) else None)
    if isinstance(adapt := sections.get("adapt"), AdaptConfig) and adapt.adapts:
        quantize = sections.get("quantize")
        known = quantize if isinstance(quantize, QuantizeConfig) else QuantizeConfig()
        yield partial(_base, adapt, LowBit.of(known))
    if isinstance(log, LogConfig):
        yield partial(require, log)
        for path in log.tasks:
            yield partial(_task_file, path)


def _dataset(path: str, model: ModelConfig | None) -> None:
    dataset = Dataset(path)
    if model is not None and 0 < model.vocab_size < dataset.vocab_size:
        raise InputError(
            f"model.vocab_size = {model.vocab_size}, but {path} needs {dataset.vocab_size}; legal: "
            f"{dataset.vocab_size} or more, or 0: just as many"
        )


def _base(adapt: AdaptConfig, form: LowBit | None) -> None:
    if not adapt.base:
        raise InputError(
            f'adapt.method = "{adapt.method}" trains beside a frozen model: adapt.base is missing; '
            "legal: a run directory, a checkpoint, or what `ptdmpi convert from-hf` made"
        )
    try:
        base_at(Path(adapt.base), form)
    except InputError as error:
        raise InputError(f"adapt.base: {error}") from None


def _task_file(path: str) -> None:
    try:
        tasks.read(Path(path))
    except InputError as error:
        raise InputError(f"log.tasks: {error}") from None


def require_writable(path: Path) -> None:
    """Raises InputError where no run directory could be at `path`."""
    there = next(one for one in (path, *path.absolute().parents) if one.exists())
    if not (there.is_dir() and os.access(there, os.W_OK | os.X_OK)):
        raise InputError(f"run.dir = {path}: {there} is no directory that can be written to")
