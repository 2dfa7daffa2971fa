# One attempt of a training run, and, in a batch job, the request for the next one when the run is
# not complete. Every template of this folder ends by sourcing it; settings stand there, not here.
#
#   LAUNCH="srun --mpi=pmix"          # the launcher and its flags
#   . jobs/run.sh CONFIG.toml [--set SECTION.KEY=VALUE ...]
#
# Read from the environment or the template:
#   BATCH         slurm or pbs: how to ask for another attempt; unset: there is none
#   LAUNCH        launcher and flags, split at blanks
#   SETUP         commands that give the job its software (module load ...)
#   MAX_ATTEMPTS  attempts in a row that may end without a new checkpoint (5)
#   SCRIPT        PBS only: the job script to submit again
# In the arguments, %a is the number of this task of a job array.
#
# The launcher's exit code alone is not believed: mpirun can return 0 after it lost a node. A run is
# complete when it says so in its run directory. Otherwise: exit code 75 (stopped on request after
# saving) and failures (a crash, a lost node) both ask for another attempt, which goes on from the
# newest checkpoint; 2 (bad input) does not, nor does a job that was cancelled.
# No `set -e`: each exit code is judged here.
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
if [ -n "${SLURM_JOB_ID:-}${PBS_JOBID:-}" ]; then  # every rank of an allocation has its own cores
    export PTDMPI_SHARED_CORES=${PTDMPI_SHARED_CORES:-0}
fi
. "$home/jobs/mpi-env.sh"
# Since 22.05, srun does not take over --cpus-per-task by itself; without it all threads of a rank
# would share one core.
[ -z "${SLURM_CPUS_PER_TASK:-}" ] || export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK
# srun: not `--kill-on-bad-exit=1`, which some sites have by default, for the first rank that exits
# with 75 would have the others killed on their way out. A rank that dies ends the others 60 s later
# at the latest (`--wait`); Open MPI's ends them at once.
export SLURM_KILL_BAD_EXIT=${SLURM_KILL_BAD_EXIT:-0} SLURM_WAIT=${SLURM_WAIT:-60}

ptdmpi=$home/.venv/bin/ptdmpi
# conda, or a virtual environment of the user's own
[ -x "$ptdmpi" ] || ptdmpi=$(command -v ptdmpi) \
    || { echo "jobs/run.sh: no ptdmpi in $home/.venv/bin or on PATH: run make setup" >&2; exit 2; }
about=$("${ptdmpi%/*}/python" "$home/jobs/run_directory.py" "$@") || exit 2
read -r steps run_dir <<< "$about"
mkdir -p "$run_dir" || exit 2

newest() { cat "$run_dir/checkpoints/latest" 2> /dev/null || echo none; }
# The last thing that a run writes; of a run that has been given more steps, it does not count.
complete() {
    local trained
    trained=$(sed -n 's/.*"steps": \([0-9]*\)}.*/\1/p' "$run_dir/done" 2> /dev/null)
    [ "${trained:-0}" -ge "$steps" ]
}
if complete; then  # the last jobs of a chain find nothing to do
    say "$run_dir is complete"
    exit 0
fi

# -- attempts: counted in the run directory, for the death of the batch node ends this shell without
# a word. A new checkpoint sets the count back; so does another job.
job=${PTDMPI_CHAIN:-${SLURM_JOB_ID:-${PBS_JOBID:-$$}}}
if [ -n "${SLURM_ARRAY_JOB_ID:-}" ]; then
    # The plain job id of an array's last task is that of the whole array.
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

# -- signals. The batch system's warning (USR1) is handed to the launcher, which hands it to all
# ranks. TERM means that the job is ending: the ranks are asked to save. A cancelled job does not
# ask for another attempt, or nobody could cancel it; a preempted one is requeued by Slurm.
launcher= asked= ending=
forward() { if [ -n "$launcher" ]; then kill -USR1 "$launcher" 2> /dev/null; fi; }
trap 'asked=yes; forward' USR1
trap 'asked=yes; ending=yes; forward' TERM INT HUP

read -ra launch <<< "$LAUNCH"
say "attempt $attempt of $limit from $before on ${SLURM_JOB_NODELIST:-$(hostname)}: $LAUNCH"
# Bash runs a trap during `wait`, never during a foreground command. A trap ends `wait`, so: again.
# In a session of its own where no batch system watches: Ctrl-C must not reach mpirun, which kills
# its ranks half a second later, but this script, which asks them to save.
[ -n "${BATCH:-}" ] || launch=(setsid "${launch[@]}")
"${launch[@]}" "$ptdmpi" train "$@" &
launcher=$!
[ -z "$asked" ] || forward
code=0
while :; do
    wait "$launcher"
    code=$?
    kill -0 "$launcher" 2> /dev/null || break
done
launcher=

# -- judgement
out_of_time() {  # the job's state is still COMPLETING, as a cancelled one's is
    [ "$BATCH" = slurm ] && scontrol show job -o "$job" 2> /dev/null | grep -q Reason=TimeLimit
}
if complete; then
    say "$run_dir is complete"
    exit 0
fi
# A launcher's 0 without a complete run is a failure.
[ "$code" -ne 0 ] || code=1
say "the run is not complete: exit code $code, newest checkpoint $(newest)"
if [ "$code" -eq 2 ]; then
    exit 2
elif [ -z "${BATCH:-}" ] || { [ -n "$ending" ] && ! out_of_time; }; then
    say "start it again to go on"
    exit "$code"
elif [ "$attempt" -ge "$limit" ] && [ "$(newest)" = "$before" ]; then
    say "$limit attempts in a row brought no new checkpoint: giving up"
    exit "$code"
fi

if [ "$BATCH" = slurm ]; then
    scontrol requeue "$job" && say "requeued"
else
    # qrerun is for operators: the job submits its successor, which waits until this one is over.
    export PTDMPI_CHAIN=$job
    next=$(qsub -W "depend=afterany:$PBS_JOBID" -v ARGS,PTDMPI_CHAIN "$SCRIPT") && say "next: $next"
fi || say "this job cannot ask for another attempt: submit it again"
exit "$code"
