"""The ranks that prepare data together. `launch.py` is the only module of data_prep that uses
MPI."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ptdmpi.base.launched import launched_size
from ptdmpi.base.outside import mendable_paths


@dataclass(frozen=True)
class Team:
    """The number of this process among the processes that work together. A single process is rank 0
    of 1."""

    rank: int
    size: int
    # returns the values of all ranks, in rank order; a collective call
    allgather: Callable[[Any], list[Any]]


def launcher_ranks() -> Team:
    """Return the ranks of this launch. MPI is imported only if a launcher has started several
    processes.

    Raise InputError if MPI then sees only one rank, since each process would do all the work.
    """
    if launched_size() == 1:
        return Team(0, 1, lambda value: [value])
    from ptdmpi.comm.launch import prepare

    prepare()
    from ptdmpi.comm.world import World

    world = World()
    return Team(world.rank, world.size, world.control.allgather)


def score_pairs(run: Path, paths: tuple[Path, ...], **options: Any) -> list[dict[str, Any]]:
    """Store the log-probabilities of the model `run` with pairs of answers, on all ranks of this
    launch. Return a table for each dataset on rank 0, and nothing on all other ranks. Raise the
    same errors as `ptdmpi.evaluate.reference.score`."""
    from ptdmpi.comm.launch import loading, prepare

    prepare()
    # this import initializes MPI, which must happen before torch starts its threads
    with loading():
        from ptdmpi.comm.world import World, fail_together
    world = World()
    with fail_together(world), mendable_paths():
        from ptdmpi.evaluate.reference import score

        tables = score(run, paths, world, **options)
    return [] if world.rank else tables
