"""Environment variables that are read before MPI is imported. The launcher sets the number of ranks
and the rank number. `ptdmpi run` sets the folder for in-memory copies of the training state.
"""

import os
from collections.abc import Mapping

# The environment variables in which launchers store the number of ranks that they have started.
# SLURM_NTASKS is not used, because Slurm also sets it for programs that a batch script starts
# without srun.
OPEN_MPI = "OMPI_COMM_WORLD_SIZE"  # set by Open MPI's mpirun
SIZE_VARIABLES = (
    OPEN_MPI,
    "PMI_SIZE",
    "SLURM_STEP_NUM_TASKS",
    "PALS_NRANKS",
    "PALS_SIZE",
)
RANK_VARIABLES = (
    "OMPI_COMM_WORLD_RANK",
    "PMIX_RANK",
    "PMI_RANK",
    "PALS_RANKID",
    "SLURM_PROCID",
)
# The variable in which `ptdmpi run` stores the path of the folder for in-memory copies of the
# training state on each node.
COPIES = "PTDMPI_COPIES"


def launched_size(environ: Mapping[str, str] = os.environ) -> int:
    """Return the number of ranks that an MPI launcher started; 1 without a launcher."""
    sizes = [environ.get(name, "") for name in SIZE_VARIABLES]
    return max((int(size) for size in sizes if size.isdigit()), default=1)


def launched_rank(environ: Mapping[str, str] = os.environ) -> int:
    """Return this process's rank, which the launcher has set; 0 without a launcher."""
    if launched_size(environ) == 1:
        return 0
    ranks = [environ.get(name, "") for name in RANK_VARIABLES]
    return next((int(rank) for rank in ranks if rank.isdigit()), 0)


def is_supervised(environ: Mapping[str, str] = os.environ) -> bool:
    """Return True if `ptdmpi run` has started this process."""
    return COPIES in environ


def launcher_kills(environ: Mapping[str, str] = os.environ) -> bool:
    """Return True if, after Ctrl-C or SIGTERM, this rank's launcher kills the rank before the rank
    can save a checkpoint.

    Open MPI's mpirun waits only a quarter of a second before it kills its ranks (PRRTE,
    `kill_local_procs` in odls/base). Under `ptdmpi run`, Ctrl-C and SIGTERM do not reach mpirun.
    """
    return OPEN_MPI in environ and not is_supervised(environ)
