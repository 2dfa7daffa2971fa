# This file runs one attempt of a training run. In a batch job, it also requests the next attempt if
# the run is not complete. Every template in this folder ends by sourcing this file. The settings
# are in the templates.
#
#   LAUNCH="srun --mpi=pmix"          # the launcher and its flags
#   RANKS=8                           # optional: start 8 ranks under `ptdmpi run`
#   . jobs/run.sh CONFIG.toml [--set SECTION.KEY=VALUE ...]
#
# The environment or the template sets these variables:
#   BATCH         slurm, pbs, lsf or flux: the batch system that starts another attempt; unset: the
#                 job has no other attempt
#   LAUNCH        launcher and its flags, split at blanks; with RANKS, no flags for ranks and hosts
#   RANKS         number of ranks: `ptdmpi run` starts them, and starts lost ranks again within the
#                 job; unset: the launcher starts them once (Slurm: as many as the allocation has)
#   HOSTS         with RANKS: a,b or a:4,b:4; unset: the hosts of the allocation, or this machine
#   CONTAINER     words that start a program in a container (apptainer exec --nv IMAGE.sif); the
#                 image must contain ptdmpi. CONTAINER cannot be combined with RANKS
#   SETUP         commands that load the job's software (module load ...)
#   MAX_ATTEMPTS  attempts in a row that may end without a new checkpoint (default: 5)
#   SCRIPT        PBS, LSF and Flux: the job script to submit again
# In the arguments, %a is replaced by the number of this task in a job array.
#
# A run is complete if its run directory contains the file `done`. The launcher's exit code is not
# enough to decide whether a run is complete, because mpirun can return 0 after it has lost a node.
# If the run is not complete, and the attempt ended with exit code 75 (stopped on request after
# saving) or with a failure (a crash, a lost node), this file requests another attempt, which
# resumes from the newest checkpoint. No other attempt is requested after exit code 2 (bad input),
# after exit code 3 (corrupt state: first examine the hosts that the log names), and after the job
# was cancelled. There is no `set -e`, because this file handles the exit codes itself.
set -uo pipefail

say() { printf '== %(%F %T)T job: %s\n' -1 "$*"; }

if [ $# -eq 0 ]; then
    echo "usage: give the template CONFIG.toml [--set SECTION.KEY=VALUE ...]" >&2
    exit 2
fi
task=${SLURM_ARRAY_TASK_ID:-${PBS_ARRAY_INDEX:-}}
[ -z "$task" ] || set -- "${@//%a/$task}"
eval "${SETUP:-}"

home=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
if [ -z "${LAUNCH:-}" ]; then
    echo "jobs/run.sh: LAUNCH is not set: source it from a template" >&2
    exit 2
fi
allocation=${SLURM_JOB_ID:-${PBS_JOBID:-${LSB_JOBID:-${FLUX_JOB_ID:-}}}}
if [ -n "$allocation" ]; then  # every rank of an allocation has its own cores
    export PTDMPI_SHARED_CORES=${PTDMPI_SHARED_CORES:-0}
fi
. "$home/jobs/mpi-env.sh"
# Since Slurm 22.05, srun does not inherit --cpus-per-task from sbatch. Without this option, all
# threads of a rank would share one core.
[ -z "${SLURM_CPUS_PER_TASK:-}" ] || export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK
# Some sites make `--kill-on-bad-exit=1` the default of srun. Then srun would kill the other ranks
# as soon as the first rank exits with 75. So turn this off, and set --wait instead: after a rank
# has died, srun ends the other ranks within 60 s. (With Open MPI they end at once.)
export SLURM_KILL_BAD_EXIT=${SLURM_KILL_BAD_EXIT:-0} SLURM_WAIT=${SLURM_WAIT:-60}

ptdmpi=$home/.venv/bin/ptdmpi
# without .venv/, use the ptdmpi on PATH, from conda or from the user's own virtual environment
[ -x "$ptdmpi" ] || ptdmpi=$(command -v ptdmpi) \
    || { echo "jobs/run.sh: no ptdmpi in $home/.venv/bin or on PATH: run make setup" >&2; exit 2; }
about=$("${ptdmpi%/*}/python" "$home/jobs/run_directory.py" "$@") || exit 2
read -r steps run_dir <<< "$about"
mkdir -p "$run_dir" || exit 2

newest() { cat "$run_dir/checkpoints/latest" 2> /dev/null || echo none; }
# A run writes the file `done` last. If run.steps has been increased since then, `done` contains
# fewer steps than run.steps, and the run is not complete.
complete() {
    local trained
    trained=$(sed -n 's/.*"steps": \([0-9]*\)}.*/\1/p' "$run_dir/done" 2> /dev/null)
    [ "${trained:-0}" -ge "$steps" ]
}
if complete; then  # an earlier job of a chain may have completed the run
    say "$run_dir is complete"
    exit 0
fi

# -- attempts. They are counted in a file in the run directory, because this shell ends without
# notice if its node is lost. The count begins again at a new checkpoint, and in a newly submitted
# job.
job=${PTDMPI_CHAIN:-${allocation:-$$}}
if [ -n "${SLURM_ARRAY_JOB_ID:-}" ]; then
    # In the last task of an array, SLURM_JOB_ID is the id of the whole array. So use the id of the
    # task.
    job=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID
fi
before=$(newest)
attempt=1
if read -r counted number latest 2> /dev/null < "$run_dir/attempts"; then
    [ "$counted $latest" != "$job $before" ] || attempt=$((number + 1))
fi
echo "$job $attempt $before" > "$run_dir/attempts"
limit=${MAX_ATTEMPTS:-5}
if [ "$attempt" -gt "$limit" ]; then
    say "$limit attempts in a row brought no new checkpoint (newest: $before): giving up"
    exit 1
fi

# -- signals. The batch system's warning (USR1) is passed to the launcher, which passes it to all
# ranks. TERM means that the job ends now, because it was cancelled or preempted, or because it is
# out of time. The ranks are asked to save. A cancelled job must not request another attempt. A
# preempted job is requeued by Slurm itself.
launcher="" asked="" ending=""
forward() { if [ -n "$launcher" ]; then kill -USR1 "$launcher" 2> /dev/null; fi; }
trap 'asked=yes; forward' USR1
trap 'asked=yes; ending=yes; forward' TERM INT HUP

if [ -n "${RANKS:-}" ]; then
    start=("$ptdmpi" run --launcher "$LAUNCH" -n "$RANKS" ${HOSTS:+--hosts "$HOSTS"})
else
    read -ra start <<< "$LAUNCH ${CONTAINER:-}"
    [ -z "${CONTAINER:-}" ] || ptdmpi=ptdmpi
    start+=("$ptdmpi" train)
fi
say "attempt $attempt of $limit from $before on ${SLURM_JOB_NODELIST:-$(hostname)}: $LAUNCH"
# Bash runs a trap during `wait`, but not while a foreground command runs, so the launcher runs in
# the background. A trap also ends `wait`, so `wait` is repeated until the launcher has ended.
"${start[@]}" "$@" &
launcher=$!
[ -z "$asked" ] || forward
code=0
while :; do
    wait "$launcher"
    code=$?
    kill -0 "$launcher" 2> /dev/null || break
done
launcher=

# -- decide: the run is complete, or has failed, or needs another attempt
out_of_time() {  # at this point Slurm shows COMPLETING for a cancelled job, too, so read the reason
    [ "$BATCH" = slurm ] && scontrol show job -o "$job" 2> /dev/null | grep -q Reason=TimeLimit
}
if complete; then
    say "$run_dir is complete"
    exit 0
fi
# the attempt has failed if the launcher returns 0 but the run is not complete
[ "$code" -ne 0 ] || code=1
say "the run is not complete: exit code $code, newest checkpoint $(newest)"
if [ "$code" -eq 2 ] || [ "$code" -eq 3 ]; then
    exit "$code"
elif [ -z "${BATCH:-}" ] || { [ -n "$ending" ] && ! out_of_time; }; then
    say "start it again to continue"
    exit "$code"
elif [ "$attempt" -ge "$limit" ] && [ "$(newest)" = "$before" ]; then
    say "$limit attempts in a row brought no new checkpoint: giving up"
    exit "$code"
fi

# Under PBS only operators may rerun a job (qrerun). So the job submits a successor, which waits for
# the end of this job.
export PTDMPI_CHAIN=$job ARGS=${ARGS:-}
case "$BATCH" in
    slurm) scontrol requeue "$job" && say "requeued" ;;
    pbs)
        next=$(qsub -W "depend=afterany:$PBS_JOBID" -v ARGS,PTDMPI_CHAIN "$SCRIPT") \
            && say "next: $next"
        ;;
    lsf) next=$(bsub -w "ended($LSB_JOBID)" < "$SCRIPT") && say "next: $next" ;;
    flux)  # the Flux instance of this job ends with it, so the parent instance gets the successor
        next=$(flux --parent batch --dependency="afterany:$FLUX_JOB_ID" "$SCRIPT") \
            && say "next: $next"
        ;;
esac || say "this job cannot ask for another attempt: submit it again"
exit "$code"
