"""What the launcher says of this process, in its environment: known before MPI is imported."""

import os
from collections.abc import Mapping

# Each launcher's variable for the ranks of this very step. Not SLURM_NTASKS, which a batch script
# has too where it calls a program without srun.
SIZE_VARIABLES = (
    "OMPI_COMM_WORLD_SIZE",
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


def launched_size(environ: Mapping[str, str] = os.environ) -> int:
    """The number of ranks that an MPI launcher says it started; 1 without one."""
    sizes = [environ.get(name, "") for name in SIZE_VARIABLES]
    return max((int(size) for size in sizes if size.isdigit()), default=1)


def launched_rank(environ: Mapping[str, str] = os.environ) -> int:
    """The number of this process among those that a launcher started; 0 without one."""
    if launched_size(environ) == 1:
        return 0
    ranks = [environ.get(name, "") for name in RANK_VARIABLES]
    return next((int(rank) for rank in ranks if rank.isdigit()), 0)
