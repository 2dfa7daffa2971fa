"""Checks of a run before memory is allocated. One rank does all checks, and a single error reports
all mistakes.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from ptdmpi.checkpoint.base import base_at, form_at
from ptdmpi.config import (
    AdaptConfig,
    Config,
    InputError,
    ModelConfig,
    QuantizeConfig,
    resolve,
)
from ptdmpi.config.adapt import WHOLE
from ptdmpi.config.configuration import Sections
from ptdmpi.config.files import parsed
from ptdmpi.data.own import is_own
from ptdmpi.data.shards import Dataset, find_shards, verify
from ptdmpi.lineage.course import Course
from ptdmpi.lineage.judge import FROM_HERE
from ptdmpi.lineage.trained_on import begun
from ptdmpi.plan.layer.legality import refusals
from ptdmpi.plan.layer.low_bit import LowBit
from ptdmpi.plan.layout.topology import topology_of
from ptdmpi.plan.machine.cluster import load_cluster
from ptdmpi.sinks.sinks import require
from ptdmpi.train import tasks
from ptdmpi.train.feed import source_of


def checked(tree: Mapping[str, Any], ranks: int, node_ranks: int | None = None) -> Config:
    """Return the configuration of a run on `ranks` ranks, with `node_ranks` ranks on each node.

    `tree` has the sections of the configuration, as parsed from TOML. The function also checks the
    data, the cluster file, the tasks and the run directory. It writes no file. Raises InputError
    with one line for each mistake.
    """
    tree = with_form(tree)
    try:
        config = resolve(tree, ranks, node_ranks)
    except InputError as error:
        checks = _section_checks(parsed(tree).sections)
        raise InputError("\n".join([str(error), *_mistakes(checks)])) from None
    checked_data(config)
    return config


def with_form(tree: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the configuration `tree` with one addition: if the frozen base model (`adapt.base`) is
    quantized, its format is added to the section [quantize].

    `tree` is returned unchanged if its [quantize] section has a format, if its base model is not
    quantized, or if the base model cannot be read. Another check reports a base model that cannot
    be read.
    """
    adapt = tree.get("adapt", {})
    quantize = tree.get("quantize", {})
    known = isinstance(adapt, Mapping) and isinstance(quantize, Mapping)
    if not known or "weights" in quantize or adapt.get("method", "none") in WHOLE:
        return tree
    form = _form_of_base(adapt.get("base"))
    if form is None:
        return tree
    return {**tree, "quantize": {"block": form.block, **quantize, "weights": form.codes}}


def _form_of_base(base: object) -> LowBit | None:
    """Return the quantized format of the model at `base`; None if the model is not quantized or
    cannot be read."""
    if not base or not isinstance(base, str):
        return None
    try:
        return form_at(Path(base))
    except InputError:
        return None


def checked_data(config: Config) -> int:
    """Check all files and directories that a run reads or writes. Return the vocabulary size.

    The datasets must be compatible with each other and have enough samples for the run. The cluster
    file, the tasks and the run directory must be usable. Raises InputError with one line for each
    mistake.
    """
    mistakes = _mistakes(_section_checks(Sections.of_config(config)))
    mistakes += refusals(config.layout, config.model)
    if mistakes:
        raise InputError("\n".join(mistakes))
    if config.data_parallel.method == "decentralized":
        topology_of(config)  # raises InputError if the topology does not fit the layout
    source = source_of(config)
    course = Course(config, begun(config, source.train))
    if config.data.verify == "start" and config.task.kind == "none":
        paths = [*(part.path for part in config.data.train), *config.data.valid_paths]
        paths = [path for path in paths if not is_own(path)]
        mistakes += _mistakes([partial(_verify, path) for path in dict.fromkeys(paths)])
    # Check that no dataset is used for more epochs than its limit. With data.change = "from here",
    # samples are counted from the step of the checkpoint, which is not known here, so this check is
    # left out.
    if config.data.change != FROM_HERE:
        mistakes += _mistakes([course.check])
    if config.log.tasks:
        mistakes += _mistakes([partial(tasks.task_files, config, course, source.vocab_size)])
    if mistakes:
        raise InputError("\n".join(mistakes))
    return source.vocab_size


def _mistakes(checks: Iterable[Callable[[], object]]) -> list[str]:
    """Call the checks. Return the lines of all InputErrors that the checks raise, without
    repetitions."""
    lines: list[str] = []
    for check in checks:
        try:
            check()
        except InputError as error:
            lines += str(error).splitlines()
    return list(dict.fromkeys(lines))


def _section_checks(sections: Sections) -> Iterator[Callable[[], object]]:
    """Yield functions without arguments, which check the configuration. Each function checks only
    one or two sections, so it can be called even if other sections have mistakes.
    """
    run = sections.run
    if run is not None:
        yield partial(require_writable, Path(run.dir))
        if run.cluster:
            yield partial(load_cluster, run.cluster)
    data = sections.data
    if data is not None:
        paths = [*(part.path for part in data.train), *data.valid_paths]
        task = sections.task
        for path in dict.fromkeys(paths):
            if task is not None and task.kind != "none":
                yield partial(tasks.items, Path(path), task)
            elif not is_own(path):
                yield partial(_dataset, path, sections.model)
    adapt = sections.adapt
    if adapt is not None and adapt.adapts:
        yield partial(_base, adapt, LowBit.of(sections.quantize or QuantizeConfig()))
    log = sections.log
    if log is not None:
        yield partial(require, log)
        for path in log.tasks:
            yield partial(_task_file, path)


def _dataset(path: str, model: ModelConfig | None) -> None:
    """Open a dataset. Raises InputError if the dataset cannot be opened, or if `model.vocab_size`
    is too small for its vocabulary."""
    dataset = Dataset(path)
    if model is not None and 0 < model.vocab_size < dataset.vocab_size:
        raise InputError(
            f"model.vocab_size = {model.vocab_size}, but {path} needs {dataset.vocab_size}; legal: "
            f"{dataset.vocab_size} or more, or 0: just as many"
        )


def _verify(path: str) -> None:
    """Read all shards of a dataset. Raises InputError with one line for each damage found."""
    problems = [line for shard in find_shards(path) for line in verify(shard)]
    if problems:
        raise InputError("\n".join(problems))


def _base(adapt: AdaptConfig, form: LowBit | None) -> None:
    """Raise InputError unless the frozen model exists and its weights have the format `form`."""
    if not adapt.base:
        raise InputError(
            f'adapt.method = "{adapt.method}" trains adapters of a frozen model: adapt.base is '
            "missing; legal: a run directory, a checkpoint, or a result of `ptdmpi convert from-hf`"
        )
    try:
        base_at(Path(adapt.base), form)
    except InputError as error:
        raise InputError(f"adapt.base: {error}") from None


def _task_file(path: str) -> None:
    """Raise InputError unless `path` is a task file."""
    try:
        tasks.read(Path(path))
    except InputError as error:
        raise InputError(f"log.tasks: {error}") from None


def require_writable(path: Path) -> None:
    """Raise InputError if no run directory can be created at `path`."""
    nearest = next(place for place in (path, *path.absolute().parents) if place.exists())
    if not (nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK)):
        raise InputError(f"run.dir = {path}: {nearest} is not a directory that can be written to")
