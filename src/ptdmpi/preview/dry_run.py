"""What `ptdmpi train --dry-run` and `ptdmpi plan CONFIG` print."""

import json
import os
from collections.abc import Mapping
from typing import Any

from ptdmpi.config import InputError
from ptdmpi.plan.search.choose import settled
from ptdmpi.preview.preview import RankCount, needed_ranks, preview
from ptdmpi.preview.words import words
from ptdmpi.terminal.launched import launched_rank, launched_size
from ptdmpi.train.checks import checked_data, with_form

LOCAL_VARIABLES = ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "PALS_LOCAL_SIZE")


def show(
    tree: Mapping[str, Any],
    ranks: int | None,
    cluster: str | None = None,
    as_json: bool = False,
    auto: bool = False,
) -> None:
    """Print the preview of a configuration, on the first of the ranks that a launcher started;
    each of them calls it. `auto`: with the layout that is searched for it. Raises InputError where
    the run would not start."""
    if launched_rank():
        return
    counted_ranks, said = _ranks(tree, ranks), ""
    if auto:
        tree, said = _laid_out(tree, counted_ranks.count)
    found = preview(tree, counted_ranks, cluster)
    if as_json:
        print(json.dumps(found), flush=True)
    else:
        print(f"{said}\n\n{words(found)}" if said else words(found), flush=True)
    if "mistake" in found:
        raise InputError(found["mistake"])


def _ranks(tree: Mapping[str, Any], given: int | None) -> RankCount:
    """Given, else as many as were started, else as many as the configuration speaks of."""
    started, local = launched_size(), _local_size()
    if given is not None and given != started:
        return RankCount(given, "as --ranks says", 0)
    if given == 1:
        return RankCount(1, "as --ranks says", 1)
    if started > 1:
        return RankCount(started, "as were started", local)
    needed, fixed = needed_ranks(tree)
    why = "as parallel.tensor, pipeline and data say"
    if not fixed:
        why = 'the fewest: parallel.data = "auto" takes all that mpirun starts; --ranks says others'
    return RankCount(needed, why, 1 if needed == 1 else 0)


def _laid_out(tree: Mapping[str, Any], ranks: int) -> tuple[Mapping[str, Any], str]:
    """The tree with the layout that --layout auto gives it, and the words about that."""
    found = settled(with_form(tree), ranks, checked_data)
    if found is None:
        raise InputError(
            "--layout auto --dry-run needs run.cluster: what a dry run measures would be measured "
            "anew by the run, and might differ. `ptdmpi probe --output here.toml`, started on as "
            "many ranks, measures this machine for --set run.cluster=here.toml"
        )
    return found


def _local_size() -> int:
    """How many ranks the launcher says it started on this host; 0 where it does not say."""
    values = (os.environ.get(name, "") for name in LOCAL_VARIABLES)
    return next((int(value) for value in values if value.isdigit()), 0)
