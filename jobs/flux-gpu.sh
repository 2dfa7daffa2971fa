#!/usr/bin/env bash
# Train on GPU nodes under Flux, one rank per GPU. This template has never run under Flux.
#
#   flux batch jobs/flux-gpu.sh CONFIG.toml [--set SECTION.KEY=VALUE ...]
#
# A signal that Flux sends before the time limit reaches the brokers of Flux, but not the ranks. So
# set `[run] max_minutes` (or --set run.max_minutes=...) some minutes below the limit. The ranks
# then save and stop with exit code 75, and the job submits its successor.
#
# ---- settings: adapt these here; flux batch's options do not reach the successor -----------------
# Flux has no commented directives: add lines for --bank=PROJECT and --queue=QUEUE if you need them.
# flux: --job-name=ptdmpi
# flux: --nodes=2
# flux: --exclusive
# flux: --time-limit=720m
# flux: --output=ptdmpi-{{id}}.log
NODES=${NODES:-2}
RANKS_PER_NODE=${RANKS_PER_NODE:-4}
# Each rank sees all GPUs of its node, and rank i of a node uses GPU i.
PLACED="--nodes=$NODES --tasks-per-node=$RANKS_PER_NODE --exclusive --setopt=gpu-affinity=off"
LAUNCH=${LAUNCH:-flux run --setopt=cpu-affinity=per-task}
LAUNCH="$LAUNCH $PLACED"
# Commands that load the job's software, for example `module load openmpi`.
SETUP=${SETUP:-}
# The path of this file, relative to the folder where flux batch was called.
SCRIPT=${SCRIPT:-jobs/flux-gpu.sh}
# --------------------------------------------------------------------------------------------------
BATCH=flux
if [ $# -eq 0 ]; then  # a successor job gets its arguments in ARGS
    read -ra arguments <<< "${ARGS:-}"
    set -- "${arguments[@]}"
fi
ARGS=$*
. "${PTDMPI_HOME:-.}/jobs/run.sh"
