#!/usr/bin/env bash
# Train with plain mpirun: on a workstation, or in an interactive allocation of any batch system
# that mpirun knows (and takes the hosts from).
#
#   RANKS=4 bash jobs/cpu-mpirun.sh CONFIG.toml [--set SECTION.KEY=VALUE ...]
#
# ---- settings ------------------------------------------------------------------------------------
RANKS=${RANKS:-4}  # tensor x pipeline x data of the configuration
THREADS=${THREADS:-1}  # compute threads per rank; ranks x threads should not exceed the cores
# --------------------------------------------------------------------------------------------------
# If there are more ranks than cores, they must share the cores.
[ $((RANKS * THREADS)) -gt "$(nproc)" ] || export PTDMPI_SHARED_CORES=0
export OMP_NUM_THREADS=$THREADS
LAUNCH="mpirun -n $RANKS"
. "$(dirname "$0")/run.sh"
