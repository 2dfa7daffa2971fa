#!/usr/bin/env bash
# Train on GPU nodes under PBS (Polaris), one rank per GPU. PBS jobs take no arguments:
#
#   qsub -v "ARGS=CONFIG.toml --set SECTION.KEY=VALUE" jobs/pbs-gpu.sh
#
# PBS sends no warning before the time limit. So set `[run] max_minutes` (or --set
# run.max_minutes=...) some minutes below walltime. The ranks then save and stop with exit code 75,
# and the job submits its successor.
#
# ---- settings: adapt these here; qsub's command line does not reach the successor ----------------
#PBS -N ptdmpi
##PBS -A PROJECT
##PBS -q prod
#PBS -l select=2
#PBS -l place=scatter
#PBS -l walltime=06:00:00
# On Polaris and Aurora a job must name its file systems.
##PBS -l filesystems=home:eagle
#PBS -j oe
# If the first node of the job is lost, PBS itself restarts the job.
#PBS -r y
RANKS_PER_NODE=${RANKS_PER_NODE:-4}
CORES_PER_RANK=${CORES_PER_RANK:-8}
# The file $PBS_NODEFILE contains one or more lines for each node.
NODES=$(sort -u "$PBS_NODEFILE")
HOSTS=$(sed "s/\$/:$RANKS_PER_NODE/" <<< "$NODES" | paste -sd,)
# `ptdmpi run` starts the ranks, and restarts lost ranks within the job. If RANKS is less than the
# default, the last nodes are spare nodes.
RANKS=${RANKS:-$(($(wc -l <<< "$NODES") * RANKS_PER_NODE))}
# The launcher, with options for PALS (HPE Cray) and MPICH. `ptdmpi run` adds -n, --ppn and --hosts.
LAUNCH=${LAUNCH:-mpiexec --depth $CORES_PER_RANK --cpu-bind depth}
# Commands that load the job's software, for example `module load conda`.
SETUP=${SETUP:-}
# The path of this file, relative to the folder where qsub was called.
SCRIPT=${SCRIPT:-jobs/pbs-gpu.sh}
# --------------------------------------------------------------------------------------------------
BATCH=pbs
cd "$PBS_O_WORKDIR" || exit 1
read -ra arguments <<< "${ARGS:-}"
set -- "${arguments[@]}"
. "${PTDMPI_HOME:-.}/jobs/run.sh"
