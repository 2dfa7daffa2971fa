"""The search for the best layout (`ptdmpi train --layout auto`). If `run.cluster` is not set, this
machine is measured first."""

from collections.abc import Mapping, Sequence
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ptdmpi.base.words import counted
from ptdmpi.config import Config, InputError
from ptdmpi.plan.search import choose
from ptdmpi.train.checks import checked_data, with_form

if TYPE_CHECKING:
    from ptdmpi.comm.world import World


def with_best_layout(
    tree: Mapping[str, Any], overrides: Sequence[str], world: "World"
) -> dict[str, Any]:
    """Return the configuration `tree` with a layout: the layout that the run already has, or, for a
    new run, the best layout.

    All ranks call this function together. If `run.cluster` is not set, this machine is measured
    first. `overrides` has the values of the --set options. Raise InputError on every rank if an
    override sets a key of the layout, or if no layout fits.
    """
    world.on_root(lambda: choose.require_free(overrides))
    tree = world.on_root(lambda: dict(with_form(tree)))
    settled = world.on_root(lambda: choose.settled(tree, world.size, checked_data))
    if settled is None:
        cluster = _measured_cluster(world.on_root(lambda: choose.bare(tree)), world)
        measured = choose.applied(tree, {"run": {"cluster": cluster}})
        settled = world.on_root(lambda: choose.settled(measured, world.size, checked_data))
    assert settled is not None, "run.cluster is set now"
    laid_out, words = settled
    if world.rank == 0:
        print(words, flush=True)
    return dict(laid_out)


def _measured_cluster(config: Config, world: "World") -> str:
    """Measure this machine, and write the result into the run directory as a cluster file. Return
    the path of this file."""
    import torch

    from ptdmpi.probe.cluster_file import save
    from ptdmpi.probe.machine import probe
    from ptdmpi.train.capacity import forget_peak

    path = Path(world.on_root(lambda: str(unused_path(Path(config.run.dir)))))
    if world.rank == 0:
        print("layout auto: no run.cluster, so this machine is measured first", flush=True)
    torch.set_num_threads(config.run.threads)
    tree, _ = probe(world, config.precision.compute, world.device())
    # the measurement has its own peak memory, which must not count as the peak memory of the run
    forget_peak()
    head = f"# Measured by `ptdmpi train --layout auto` on {counted(world.size, 'rank')}.\n"
    world.on_root(lambda: save(path, tree, head))
    return str(path)


def unused_path(folder: Path) -> Path:
    """Make `folder` if it is missing, and return a path in it for a new cluster file.

    The path is cluster.toml, or, if older files exist, cluster-2.toml, cluster-3.toml, and so on.
    An older file is kept, because `ptdmpi report` uses it to predict the steps of an older attempt.
    Raise InputError if the folder cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"run.dir = {folder}: {error.strerror}") from None
    first = folder / "cluster.toml"
    numbered = (first.with_stem(f"{first.stem}-{number}") for number in count(2))
    return next(path for path in chain([first], numbered) if not path.exists())
