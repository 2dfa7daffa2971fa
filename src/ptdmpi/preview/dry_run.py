"""The output of `ptdmpi train --dry-run` and `ptdmpi plan CONFIG`."""

import json
import os
from collections.abc import Mapping
from typing import Any

from ptdmpi.base.launched import launched_rank, launched_size
from ptdmpi.base.words import printable
from ptdmpi.config import InputError
from ptdmpi.plan.search.choose import settled
from ptdmpi.preview.as_text import as_text
from ptdmpi.preview.forecast import preview
from ptdmpi.preview.ranks import RankCount, needed_ranks
from ptdmpi.train.checks import checked_data, with_form

LOCAL_VARIABLES = ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "PALS_LOCAL_SIZE")


def show(
    tree: Mapping[str, Any],
    ranks: int | None,
    *,
    cluster: str | None = None,
    as_json: bool = False,
    auto: bool = False,
) -> None:
    """Print the preview of a configuration.

    If a launcher started several ranks, all of them may call this function, but only rank 0 prints.
    `ranks` is the number of ranks of the run. If `ranks` is None and a launcher has started several
    ranks, their number is used. Without a launcher, the number of ranks that the configuration
    needs is used. `cluster` replaces run.cluster. If `auto` is True, the function first searches
    for the best layout, and previews this layout. Raise InputError if the run would not start.
    """
    if launched_rank():
        return
    counted_ranks = _ranks(tree, ranks)
    search = ""
    if auto:
        tree, words = _laid_out(tree, counted_ranks.count)
        search = f"{words}\n\n"
    forecast = preview(tree, counted_ranks, cluster)
    if as_json:
        print(json.dumps(forecast), flush=True)
    else:
        print(printable(f"{search}{as_text(forecast)}"), flush=True)
    if "mistake" in forecast:
        raise InputError(forecast["mistake"])


def _ranks(tree: Mapping[str, Any], given: int | None) -> RankCount:
    """Return the number of ranks with an explanation. If `given` is not None, return this number.
    Otherwise the number of ranks that a launcher has started is used, or, without a launcher, the
    number of ranks that the run needs."""
    started = launched_size()
    if given is not None and given != started:
        return RankCount(given, "as --ranks says", 0)
    if given == 1:
        return RankCount(1, "as --ranks says", 1)
    if started > 1:
        return RankCount(started, "as the launcher started", _local_size())
    needed, fixed = needed_ranks(tree)
    why = "as parallel.tensor, pipeline and data say"
    if not fixed:
        why = 'the fewest: parallel.data = "auto" takes all that mpirun starts; or set --ranks'
    return RankCount(needed, why, 1 if needed == 1 else 0)


def _laid_out(tree: Mapping[str, Any], ranks: int) -> tuple[Mapping[str, Any], str]:
    """Return the configuration tree with the layout that `--layout auto` finds for `ranks` ranks,
    and a text about the search.

    Raise InputError if run.cluster is not set.
    """
    laid_out = settled(with_form(tree), ranks, checked_data)
    if laid_out is None:
        raise InputError(
            "--layout auto --dry-run needs run.cluster: the run would measure this machine again, "
            "and might find another layout. `ptdmpi probe --output here.toml`, started on as "
            "many ranks, measures this machine for --set run.cluster=here.toml"
        )
    return laid_out


def _local_size() -> int:
    """Return the number of ranks that the launcher started on this host; 0 if the launcher does not
    report this number."""
    values = (os.environ.get(name, "") for name in LOCAL_VARIABLES)
    return next((int(value) for value in values if value.isdigit()), 0)
