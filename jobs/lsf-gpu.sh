#!/usr/bin/env bash
# Train on GPU nodes under LSF, one rank per GPU. This template has never run under LSF.
#
#   ARGS="CONFIG.toml --set SECTION.KEY=VALUE" bsub < jobs/lsf-gpu.sh
#
# The warning that LSF can send before the time limit goes to every process, so it would end the
# daemons of mpirun. Instead, set `[run] max_minutes` (or --set run.max_minutes=...) some minutes
# below -W. The ranks then save and stop with exit code 75, and the job submits its successor.
#
# ---- settings: adapt these here; bsub's command line does not reach the successor ----------------
#BSUB -J ptdmpi
##BSUB -P PROJECT
##BSUB -q QUEUE
# The total number of ranks, and the number of ranks per node.
#BSUB -n 8
#BSUB -R span[ptile=4]
#BSUB -gpu num=4/host
#BSUB -W 12:00
#BSUB -o ptdmpi-%J.log
# If the first node of the job is lost, LSF itself restarts the job.
#BSUB -r
# LSB_MCPU_HOSTS contains the name of each node, followed by its number of ranks.
NODES=$(xargs -n 2 <<< "$LSB_MCPU_HOSTS")
HOSTS=$(tr ' ' ':' <<< "$NODES" | paste -sd,)
# `ptdmpi run` starts the ranks, and restarts lost ranks within the job. If RANKS is less than the
# default, the last nodes are spare nodes.
RANKS=${RANKS:-$(awk '{ranks += $2} END {print ranks}' <<< "$NODES")}
# The launcher. `ptdmpi run` adds the options for the number of ranks and the hosts.
LAUNCH=${LAUNCH:-mpirun}
# Commands that load the job's software, for example `module load openmpi`.
SETUP=${SETUP:-}
# The path of this file, relative to the folder where bsub was called.
SCRIPT=${SCRIPT:-jobs/lsf-gpu.sh}
# --------------------------------------------------------------------------------------------------
BATCH=lsf
read -ra arguments <<< "${ARGS:-}"
set -- "${arguments[@]}"
. "${PTDMPI_HOME:-.}/jobs/run.sh"
