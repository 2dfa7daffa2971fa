"""The one place of data_prep that knows of MPI: which of how many ranks this process is."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ptdmpi.terminal.launched import launched_size


@dataclass(frozen=True)
class Team:
    """This process among those that work together; one process alone is rank 0 of 1."""

    rank: int
    size: int
    allgather: Callable[[Any], list[Any]]  # everyone's value, in rank order; waits for everyone


def launcher_ranks() -> Team:
    """The ranks of this launch. MPI is imported only when a launcher started more than one process.

    Raises InputError where MPI sees one rank only, so that each would do all the work.
    """
    if launched_size() == 1:
        return Team(0, 1, lambda value: [value])
    from ptdmpi.comm.launch import prepare

    prepare()
    from ptdmpi.comm.world import World

    world = World()
    return Team(world.rank, world.size, world.control.allgather)
