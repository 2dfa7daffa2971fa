"""The ranks that prepare data together, and the start of MPI. `launch.py` is the only module of
data_prep that uses MPI."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ptdmpi.base.launched import launched_size
from ptdmpi.base.outside import mendable_paths


@dataclass(frozen=True)
class Team:
    """The processes that work together, and the rank of this process among them. If there is only
    one process, it has rank 0 and size 1."""

    rank: int
    size: int
    # a collective function: it returns the values that all ranks passed, in rank order
    allgather: Callable[[Any], list[Any]]


def launcher_ranks() -> Team:
    """Return the ranks that the launcher has started. MPI is imported only if a launcher has
    started several processes.

    Raise InputError if MPI reports only one rank although the launcher has started several
    processes; each process would then do all the work.
    """
    if launched_size() == 1:
        return Team(0, 1, lambda value: [value])
    from ptdmpi.comm.launch import prepare

    prepare()
    from ptdmpi.comm.world import World

    world = World()
    return Team(world.rank, world.size, world.control.allgather)


def store_scores(run: Path, paths: tuple[Path, ...], **options: Any) -> list[dict[str, Any]]:
    """Store the outputs of the model `run` with datasets, on all ranks of this launch. Return a
    table for each dataset on rank 0, and an empty list on all other ranks. For the options and the
    errors see `ptdmpi.evaluate.stored_scores.score`."""
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
