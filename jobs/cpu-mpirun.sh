#!/usr/bin/env bash
# Train with mpirun of Open MPI or MPICH: on a workstation, on the hosts in HOSTS, or in an
# interactive allocation of a batch system from which mpirun can read the hosts. `ptdmpi run` starts
# mpirun, and restarts lost ranks.
#
#   RANKS=4 bash jobs/cpu-mpirun.sh CONFIG.toml [--set SECTION.KEY=VALUE ...]
#
# ---- settings ------------------------------------------------------------------------------------
RANKS=${RANKS:-4}  # tensor x context x pipeline x data of the configuration
THREADS=${THREADS:-1}  # compute threads per rank; ranks x threads should not exceed the cores
HOSTS=${HOSTS:-}  # for example n1:4,n2:4; empty: the hosts of the allocation, or this machine
LAUNCH=${LAUNCH:-mpirun}  # the launcher and its options, but not -n
# --------------------------------------------------------------------------------------------------
# if there are enough cores, the ranks need not share cores
[ $((RANKS * THREADS)) -gt "$(nproc)" ] || export PTDMPI_SHARED_CORES=0
export OMP_NUM_THREADS=$THREADS
. "$(dirname "$0")/run.sh"
