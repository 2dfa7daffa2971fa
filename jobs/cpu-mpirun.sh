#!/usr/bin/env bash
# Train with plain mpirun: on a workstation, or inside an allocation of any batch system that mpirun
# knows (it then takes the hosts from there).
#
#   RANKS=4 bash jobs/cpu-mpirun.sh CONFIG.toml [--set SECTION.KEY=VALUE ...]
set -euo pipefail
if [ $# -eq 0 ]; then
    echo "usage: RANKS=4 bash jobs/cpu-mpirun.sh CONFIG.toml [--set SECTION.KEY=VALUE ...]" >&2
    exit 2
fi

# ---- settings ----------------------------------------------------------------------------------
RANKS=${RANKS:-4}  # tensor x pipeline x data of the configuration
THREADS=${THREADS:-1}  # compute threads per rank; ranks x threads should not exceed the cores
# ------------------------------------------------------------------------------------------------

here=$(cd "$(dirname "$0")" && pwd)
# Ranks that outnumber the cores of one machine must share them. In an allocation each has its own.
allocation=${SLURM_JOB_ID:-}${PBS_JOBID:-}${LSB_JOBID:-}
if [ -n "$allocation" ] || [ $((RANKS * THREADS)) -le "$(nproc)" ]; then
    export PTDMPI_SHARED_CORES=0
fi
export OMP_NUM_THREADS=$THREADS
. "$here/mpi-env.sh"
ptdmpi=$here/../.venv/bin/ptdmpi
[ -x "$ptdmpi" ] || ptdmpi=ptdmpi  # conda, or a virtual environment of the user's own
exec mpirun -n "$RANKS" "$ptdmpi" train "$@"
