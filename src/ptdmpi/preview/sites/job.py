"""A training run as a job of a batch system. A job has a site, a number of nodes, and settings that
are added to the configuration."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ptdmpi.base.errors import InputError
from ptdmpi.base.say import note
from ptdmpi.base.words import counted
from ptdmpi.config import load, resolve
from ptdmpi.config.layout import Layout
from ptdmpi.plan.search.choose import require_free, settled
from ptdmpi.preview.ranks import needed_ranks
from ptdmpi.preview.sites.site import Site
from ptdmpi.train.checks import checked_data, with_form

# Schedulers that do not warn a job before its time limit, or that send a warning which a training
# run cannot use. With these schedulers, the run stops by itself before the time limit
# (`run.max_minutes`).
UNWARNED = ("pbs", "lsf", "flux")
# Keys whose default in a configuration differs from their default in `Layout`.
UNSET = {"parallel": {"data": "auto"}}
LONGEST_NAME = 63  # Maximum number of characters in the name of a job in Kubernetes.
MARGIN_MINUTES = 10  # Minutes that are reserved for the last step and its checkpoint.


@dataclass(frozen=True)
class TrainingJob:
    """A training run as a job of a batch system. `settings` are added to the configuration in the
    file `config`."""

    config: Path
    settings: tuple[str, ...]
    site: Site
    nodes: int
    ranks_per_node: int

    @property
    def ranks(self) -> int:
        """Return the number of ranks of the job."""
        return self.nodes * self.ranks_per_node

    @property
    def name(self) -> str:
        """Return the name of the job. The name has only letters, digits and hyphens, which every
        scheduler accepts."""
        words = re.sub(r"[^a-z0-9]+", "-", self.config.stem.lower()).strip("-")
        return f"ptdmpi-{words}"[:LONGEST_NAME].rstrip("-")

    @property
    def arguments(self) -> list[str]:
        """Return the arguments that the job's script passes to `ptdmpi train` or `ptdmpi run`."""
        return [str(self.config), *(w for setting in self.settings for w in ("--set", setting))]


def job_of(
    config: Path, settings: tuple[str, ...], site: Site, nodes: int | None, *, planned: bool
) -> TrainingJob:
    """Return the job that trains a configuration on `nodes` nodes of a site. If `nodes` is None,
    the job has as many nodes as the layout needs. If `planned` is True, the planner searches for
    the best layout on the site's cluster.

    Raise InputError if the configuration has mistakes, or if its layout does not fit this number of
    nodes.
    """
    tree = load(config, settings)
    per_node = site.node.ranks
    if nodes is None:
        if planned:
            raise InputError("--plan needs --nodes: the search is for a number of ranks")
        nodes, per_node = _needed_nodes(tree, site)
    ranks = nodes * per_node
    added = list(settings)
    if planned:
        require_free(settings)
        added += _planned(tree, ranks, site)
    else:
        resolve(with_form(tree), ranks, per_node)
    run = tree.get("run", {})
    if site.scheduler in UNWARNED and "max_minutes" not in run:
        margin = min(MARGIN_MINUTES, site.minutes // 2)
        added.append(f"run.max_minutes={max(1, site.minutes - margin)}")
    return TrainingJob(
        config=config, settings=tuple(added), site=site, nodes=nodes, ranks_per_node=per_node
    )


def _needed_nodes(tree: Mapping[str, Any], site: Site) -> tuple[int, int]:
    """Return (number of nodes, ranks per node) for a configuration whose layout accepts only one
    number of ranks."""
    ranks, fixed = needed_ranks(tree)
    if not fixed:
        raise InputError(
            'how many nodes? legal: --nodes NODES; with parallel.data = "auto" the data axis takes '
            "all ranks"
        )
    per_node = min(ranks, site.node.ranks)
    if ranks % per_node:
        raise InputError(
            f"the layout needs {counted(ranks, 'rank')}, and a node of site {site.name} has "
            f"{per_node}: legal are multiples of {per_node}, or less than one node"
        )
    return ranks // per_node, per_node


def _planned(tree: dict[str, Any], ranks: int, site: Site) -> list[str]:
    """Return the planner's best layout for the site's cluster, as settings ("section.key=value") to
    be added to the configuration."""
    run = tree.get("run", {})
    cluster = site.cluster or run.get("cluster")
    if not cluster:
        raise InputError(
            f"--plan needs the machine: cluster in the file of site {site.name}, or run.cluster; "
            'legal: a name such as "a100", or a cluster file'
        )
    where = {**run, "cluster": cluster}
    note(f"ptdmpi submit: searching the layout on {counted(ranks, 'rank')}")
    laid_out = settled(with_form({**tree, "run": where}), ranks, checked_data, as_planned=True)
    assert laid_out is not None, "run.cluster is set"
    chosen, words = laid_out
    note(words)
    settings = []
    for section, defaults in Layout(1, 1, 1).sections().items():
        own = {**defaults, **UNSET.get(section, {}), **tree.get(section, {})}
        for key in defaults:
            value = chosen[section][key]
            if value != own[key]:
                settings.append(f"{section}.{key}={json.dumps(value)}")
    return settings
