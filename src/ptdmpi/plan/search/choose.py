"""The layout of a run as the search finds it: `ptdmpi train --layout auto`.

The file's own sizes of the axes, schedule, microbatch and recomputation are left aside; all else of
the configuration stays. A run that has a checkpoint keeps the layout that it has.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ptdmpi.config import Config, InputError, load, resolve
from ptdmpi.config.layout import Layout
from ptdmpi.config.legality import stages_of_zero
from ptdmpi.plan.cost.price import Price, Pricer
from ptdmpi.plan.machine.cluster import Cluster, Model, load_cluster
from ptdmpi.plan.search.search import search
from ptdmpi.plan.search.space import Space
from ptdmpi.plan.show import table

# section -> the keys that are chosen
CHOSEN = {name: tuple(keys) for name, keys in Layout(1, 1, 1).sections().items()}


def bare(tree: Mapping[str, Any]) -> Config:
    """The configuration without what will be chosen, as of one rank. Raises InputError for all
    mistakes that stand in it."""
    left = {
        name: dict(section) if isinstance(section, Mapping) else section
        for name, section in tree.items()
    }
    for name, keys in CHOSEN.items():
        section = left.get(name)
        if isinstance(section, dict):
            left[name] = {key: value for key, value in section.items() if key not in keys}
    run = left.get("run")
    if isinstance(run, dict):
        left["run"] = {**run, "spare_ranks": 0}
    return resolve(left, 1)


def require_free(overrides: Sequence[str]) -> None:
    """Raises InputError for a `--set SECTION.KEY=VALUE` of a key that the search chooses."""
    for override in overrides:
        section, _, key = override.partition("=")[0].strip().partition(".")
        if key in CHOSEN.get(section, ()):
            raise InputError(
                f"--layout auto chooses {section}.{key}, so --set {override} would be lost: leave "
                "one of the two out; `ptdmpi plan --layout` prices a layout of your own"
            )


def working_ranks(tree: Mapping[str, Any], ranks: int) -> int:
    """Those that train. Raises InputError if all are spare."""
    spare = tree.get("run", {}).get("spare_ranks", 0)
    if not isinstance(spare, int) or not 0 <= spare < ranks:
        raise InputError(f"run.spare_ranks = {spare}: legal are 0 to {ranks - 1}")
    return ranks - spare


def begun(config: Config, ranks: int) -> dict[str, dict[str, Any]] | None:
    """What was chosen for this run before, if it has a checkpoint, the same model and batch, and as
    many ranks; else None."""
    path = Path(config.run.dir)
    if config.checkpoint.resume == "never" or not any(path.glob("checkpoints/step-*")):
        return None
    try:
        before = resolve(load(path / "config.toml"), ranks)
    except InputError:  # of another number of ranks, or not there
        return None
    same = before.model == config.model
    if not same or before.batch.global_size != config.batch.global_size:
        return None
    return {
        name: {key: getattr(getattr(before, name), key) for key in keys}
        for name, keys in CHOSEN.items()
    } | {"run": {"cluster": config.run.cluster or before.run.cluster}}


def choose(
    config: Config, vocab_size: int, cluster: Cluster, ranks: int
) -> tuple[list[Price], Pricer]:
    """The best layouts of the run on `ranks` of the cluster, the best one first. Raises InputError
    if none fits."""
    model = Model(config.run.name, config.model, vocab_size)
    pricer = Pricer(cluster, model, config.batch.global_size, config.precision.compute)
    space = Space(ranks, zero=stages_of_zero(config.run.reproducible))
    return search(pricer, space), pricer


def settled(
    tree: Mapping[str, Any], ranks: int, vocabulary: Callable[[Config], int]
) -> tuple[dict[str, Any], str] | None:
    """(the tree with the layout that its run has, or else the best one; words that say which).

    None where `run.cluster` names no machine, so that this one must be measured first.
    `vocabulary` opens the data of a configuration and says how many ids they have. Raises
    InputError if no layout fits.
    """
    working, config = working_ranks(tree, ranks), bare(tree)
    before = begun(config, ranks)
    if before is not None:
        return applied(tree, before), f"layout auto: as {config.run.dir} has it"
    vocab_size = vocabulary(config)
    if not config.run.cluster:
        return None
    prices, pricer = choose(config, vocab_size, load_cluster(config.run.cluster), working)
    return applied(tree, prices[0].layout.sections()), words(prices, pricer)


def applied(tree: Mapping[str, Any], chosen: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The tree with the keys of `chosen` set."""
    return {**tree, **{name: {**tree.get(name, {}), **keys} for name, keys in chosen.items()}}


def words(prices: list[Price], pricer: Pricer) -> str:
    """What was chosen, and what it was chosen before."""
    entries = [table.numbers(price, pricer, None) for price in prices]
    head = f"layout auto on {pricer.cluster.name}: {entries[0]['layout']}, "
    return "\n".join([head + table.settings(entries[0]), *table.overview(entries)])
