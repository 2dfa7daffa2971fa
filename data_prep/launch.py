"""The ranks that prepare data together, and the start of MPI. No other module of data_prep uses
MPI."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ptdmpi.base.launched import launched_size
from ptdmpi.base.outside import mendable_paths


@dataclass(frozen=True)
class Team:
    """The processes that work together: their number `size`, and the rank of this process. A single
    process has rank 0 and size 1."""

    rank: int
    size: int
    # A collective function: each rank passes a value, and gets the list of the values of all ranks,
    # in the order of the ranks.
    allgather: Callable[[Any], list[Any]]


def launcher_ranks() -> Team:
    """Return the ranks that the launcher has started. MPI is imported only if a launcher has
    started several processes.

    Raise InputError if MPI reports only one rank although the launcher has started several
    processes, because each process would then do all the work.
    """
    if launched_size() == 1:
        return Team(0, 1, lambda value: [value])
    from ptdmpi.comm.launch import prepare

    prepare()
    from ptdmpi.comm.world import World

    world = World()
    return Team(world.rank, world.size, world.control.allgather)


def store_scores(run: Path, paths: tuple[Path, ...], **options: Any) -> list[dict[str, Any]]:
    """Compute the outputs of the model `run` for the datasets `paths`, and store them with the
    datasets, using all ranks. On rank 0, return a list with a table for each dataset; on all other
    ranks, return an empty list. See `ptdmpi.evaluate.stored_scores.score` for the options and the
    errors."""
    from ptdmpi.comm.launch import loading, prepare

    prepare()
    # this import initializes MPI, which must happen before torch starts its threads
    with loading():
        from ptdmpi.comm.world import World, fail_together
    world = World()
    with fail_together(world), mendable_paths():
        from ptdmpi.evaluate.stored_scores import score

        tables = score(run, paths, world, **options)
    return [] if world.rank else tables
