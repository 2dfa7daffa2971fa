"""The one place of data_prep that knows of MPI: which of how many ranks this process is."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

# Each launcher's variable for the ranks of this very step. Not SLURM_NTASKS, which a batch script
# has too where it calls a program without srun.
_SIZE_VARIABLES = (
    "OMPI_COMM_WORLD_SIZE",
    "PMI_SIZE",
    "SLURM_STEP_NUM_TASKS",
    "PALS_NRANKS",
    "PALS_SIZE",
)


@dataclass(frozen=True)
class Ranks:
    """This process among those that work together; one process alone is rank 0 of 1."""

    rank: int
    size: int
    allgather: Callable[[Any], list[Any]]  # everyone's value, in rank order; waits for everyone


def launched_size(environ: Mapping[str, str]) -> int:
    """The number of ranks that an MPI launcher says it started; 1 without one."""
    sizes = [environ.get(name, "") for name in _SIZE_VARIABLES]
    return max((int(size) for size in sizes if size.isdigit()), default=1)


def launcher_ranks() -> Ranks:
    """The ranks of this launch. MPI is imported only when a launcher started more than one process.

    Raises InputError where MPI sees one rank only, so that each would do all the work.
    """
    if launched_size(os.environ) == 1:
        return Ranks(0, 1, lambda value: [value])
    from ptdmpi.comm.launch import prepare

    prepare()
    from ptdmpi.comm.world import World

    world = World()
    return Ranks(world.rank, world.size, world.control.allgather)
