"""What `ptdmpi train --dry-run` and `ptdmpi plan CONFIG` print."""

import json
import os
from collections.abc import Mapping
from typing import Any

from ptdmpi.config import InputError
from ptdmpi.preview.preview import RankCount, needed_ranks, preview
from ptdmpi.preview.words import words
from ptdmpi.terminal.launched import launched_rank, launched_size

LOCAL_VARIABLES = ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "PALS_LOCAL_SIZE")


def show(
    tree: Mapping[str, Any], ranks: int | None, cluster: str | None = None, as_json: bool = False
) -> None:
    """Print the preview of a configuration, on the first of the ranks that a launcher started;
    each of them calls it. Raises InputError where the run would not start."""
    if launched_rank():
        return
    found = preview(tree, _ranks(tree, ranks), cluster)
    print(json.dumps(found) if as_json else words(found), flush=True)
    if "mistake" in found:
        raise InputError(found["mistake"])


def _ranks(tree: Mapping[str, Any], given: int | None) -> RankCount:
    """Given, else as many as were started, else as many as the configuration speaks of."""
    started, local = launched_size(), _local_size()
    if given is not None and given != started:
        return RankCount(given, "as --ranks says", 0)
    if started > 1:
        return RankCount(started, "as were started", local)
    needed = needed_ranks(tree)
    if needed > 1:
        return RankCount(needed, "as the configuration needs at least; --ranks for others", 0)
    return RankCount(1, "this one", 1)


def _local_size() -> int:
    """How many ranks the launcher says it started on this host; 0 where it does not say."""
    values = (os.environ.get(name, "") for name in LOCAL_VARIABLES)
    return next((int(value) for value in values if value.isdigit()), 0)
