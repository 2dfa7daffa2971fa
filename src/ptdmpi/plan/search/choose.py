"""The choice of a run's layout for `ptdmpi train --layout auto`.

The search sets only the keys of the configuration that belong to a layout: the sizes of the axes,
the schedule, the microbatch size, the recomputation and the sharding. If the run has a checkpoint,
nothing is searched, and the run keeps its layout.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ptdmpi.base.near import divisors
from ptdmpi.base.words import counted
from ptdmpi.config import Config, DataParallelConfig, InputError, load, resolve
from ptdmpi.config.configuration import Sections
from ptdmpi.config.layout import Layout
from ptdmpi.config.methods import may_share, replicas_differ
from ptdmpi.config.rules.context import may_cut
from ptdmpi.config.rules.experts import may_deal
from ptdmpi.plan.cost.price import Price, Pricer
from ptdmpi.plan.layout.run_method import RunMethod
from ptdmpi.plan.layout.topology import file_ranks
from ptdmpi.plan.machine.cluster import Cluster, Model, load_cluster
from ptdmpi.plan.search.search import HEADROOM, TIE, search
from ptdmpi.plan.search.space import Space
from ptdmpi.plan.show import table

# section -> the keys that the search chooses
CHOSEN = {name: tuple(keys) for name, keys in Layout(1, 1, 1).sections().items()}


def bare(tree: Mapping[str, Any]) -> Config:
    """Return the configuration `tree` without the keys that the search chooses, validated as a
    configuration for one rank. Raises InputError with all mistakes of the configuration."""
    left = {
        name: dict(section) if isinstance(section, Mapping) else section
        for name, section in tree.items()
    }
    for name, keys in CHOSEN.items():
        section = left.get(name)
        if isinstance(section, dict):
            left[name] = {key: value for key, value in section.items() if key not in keys}
    together = left.get("task", {}).get("choices")
    # The default microbatch size may be illegal, because the size must be a multiple of
    # `task.choices`.
    if together and isinstance(left.get("batch"), dict):
        left["batch"]["micro_size"] = together
    run = left.get("run")
    if isinstance(run, dict):
        left["run"] = {**run, "spare_ranks": 0}
    return resolve(left, 1)


def require_free(overrides: Sequence[str]) -> None:
    """Raise InputError if an override `--set SECTION.KEY=VALUE` sets a key that the search
    chooses."""
    for override in overrides:
        section, _, key = override.partition("=")[0].strip().partition(".")
        if key in CHOSEN.get(section, ()):
            raise InputError(
                f"--layout auto chooses {section}.{key}, so --set {override} would be lost: leave "
                "one of the two out; `ptdmpi plan --layout` prices a layout of your own"
            )


def working_ranks(tree: Mapping[str, Any], ranks: int) -> int:
    """Return the number of ranks that train, which is `ranks` without the spare ranks. Raises
    InputError if `run.spare_ranks` is not an integer from 0 to `ranks` - 1."""
    spare = tree.get("run", {}).get("spare_ranks", 0)
    if not isinstance(spare, int) or not 0 <= spare < ranks:
        raise InputError(f"run.spare_ranks = {spare}: legal are 0 to {ranks - 1}")
    return ranks - spare


def begun(config: Config, ranks: int) -> dict[str, dict[str, Any]] | None:
    """Return the layout with which the run of `config` was started, as keys of a configuration.
    Return None if the run has no checkpoint, if `checkpoint.resume` is "never", or if the run was
    started with another model, another batch or another number of ranks."""
    path = Path(config.run.dir)
    if config.checkpoint.resume == "never" or not any(path.glob("checkpoints/step-*")):
        return None
    try:
        before = resolve(load(path / "config.toml"), ranks)
    except InputError:  # config.toml does not exist, or is for a different number of ranks
        return None
    same = before.model == config.model
    if not same or before.batch.global_size != config.batch.global_size:
        return None
    return {
        name: {key: getattr(getattr(before, name), key) for key in keys}
        for name, keys in CHOSEN.items()
    } | {"run": {"cluster": config.run.cluster or before.run.cluster}}


def replicas(config: Config, ranks: int) -> tuple[int, ...] | None:
    """Return the data-parallel sizes that are legal on `ranks` ranks, or None if every size is
    legal. Two settings restrict the size: a topology from a file of edges, and datasets that are
    split by rank. Raises InputError if no size is legal."""
    graph, dealt = file_ranks(config.data_parallel), len(config.data.train)
    if graph is None and config.data.split == "shared":
        return None
    sizes = tuple(
        size
        for size in divisors(ranks)
        if graph in (None, size) and (config.data.split == "shared" or dealt % size == 0)
    )
    if not sizes:
        name = config.data_parallel.topology
        file = f"data_parallel.topology = {name} is a graph over {graph} data ranks"
        split = f'data.split = "by_rank" deals {counted(dealt, "dataset")}'
        reasons = [file] if graph is not None else []
        reasons += [split] if config.data.split != "shared" else []
        raise InputError(
            f"{', and '.join(reasons)}: no layout of {counted(ranks, 'rank')} has a legal "
            "data-parallel size"
        )
    return sizes


def choose(
    config: Config, vocab_size: int, cluster: Cluster, ranks: int, *, as_planned: bool = False
) -> tuple[list[Price], Pricer]:
    """Return the best layouts of the run on `ranks` ranks of the cluster, the best layout first,
    and their pricer. If `as_planned` is True, the layouts are chosen as `ptdmpi plan` chooses them:
    some memory stays free, and the simplest of almost equally fast layouts comes first. Raises
    InputError if no layout fits."""
    model = Model(config.run.name, config.model, vocab_size)
    batch, precision = config.batch.global_size, config.precision.compute
    method = RunMethod.of(config, math.ceil(ranks / cluster.node.devices))
    pricer = Pricer.of(cluster, model, batch, precision, method=method)
    whole = config.optimizer.has_matrices
    space = Space(
        ranks,
        zero=may_share(config.data_parallel, config.run.reproducible),
        offload="none" if replicas_differ(config.data_parallel) or whole else None,
        data=replicas(config, ranks),
        sequences=config.task.sequences,
        cuts_sequences=may_cut(Sections.of_config(config)),
        deals_experts=may_deal(Sections.of_config(config)),
    )
    if as_planned:
        return search(pricer.keeping_free(HEADROOM / 100), space, tie=TIE), pricer
    return search(pricer, space), pricer


def settled(
    tree: Mapping[str, Any],
    ranks: int,
    vocabulary: Callable[[Config], int],
    *,
    as_planned: bool = False,
) -> tuple[dict[str, Any], str] | None:
    """Return the configuration tree with a layout, and a text about the choice of this layout. A
    run with a checkpoint keeps its layout. Otherwise the search chooses the best layout.

    Return None if `run.cluster` is not set and the run has no checkpoint. The caller must then
    measure this machine first. `vocabulary` is a function that opens the data of a configuration
    and returns the size of the vocabulary. If `as_planned` is True, the search keeps some memory
    free and prefers simple layouts, as `ptdmpi plan` does. Raises InputError if no layout fits.
    """
    working, config = working_ranks(tree, ranks), bare(tree)
    before = begun(config, ranks)
    if before is not None:
        return applied(tree, before), f"layout auto: the layout of the run in {config.run.dir}"
    # the section [data_parallel] is replaced by its defaults, because its topology depends on the
    # number of data ranks, which is not chosen yet
    vocab_size = vocabulary(config.model_copy(update={"data_parallel": DataParallelConfig()}))
    if not config.run.cluster:
        return None
    cluster = load_cluster(config.run.cluster)
    prices, pricer = choose(config, vocab_size, cluster, working, as_planned=as_planned)
    return applied(tree, prices[0].layout.sections()), words(prices, pricer)


def applied(tree: Mapping[str, Any], chosen: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return a copy of the configuration tree `tree` in which the values of `chosen` replace those
    of `tree`."""
    return {**tree, **{name: {**tree.get(name, {}), **keys} for name, keys in chosen.items()}}


def words(prices: list[Price], pricer: Pricer) -> str:
    """Return the text that reports the choice: the chosen layout, which is the first of `prices`,
    and the table of the best layouts."""
    entries = [table.numbers(price, pricer, None) for price in prices]
    head = f"layout auto on {pricer.cluster.name}: {entries[0]['layout']}, "
    return "\n".join([head + table.settings(entries[0]), *table.overview(entries)])
