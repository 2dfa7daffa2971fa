"""The job scripts with stand-ins for the launcher and the batch system; tests/slurm has a real one.

The stand-in of the launcher prints how it is called, does what the test says, and exits by `code`.
"""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests._shell import NEEDS_SHELLCHECK, shellcheck
from tests.parallel import ROOT

SCRIPTS = sorted([*ROOT.glob("jobs/*.sh"), *ROOT.glob("jobs/*.sbatch"), ROOT / ".ci" / "run"])
SLURM = sorted(path.name for path in ROOT.glob("jobs/*.sbatch"))
TEMPLATES = [*SLURM, "pbs-gpu.sh", "lsf-gpu.sh", "flux-gpu.sh", "cpu-mpirun.sh"]
# Writes the checkpoint of step $saves, if any, as training does, and waits where a test signals it.
LAUNCHER = """#!/bin/bash
echo "$(basename "$0") $*: $SRUN_CPUS_PER_TASK/$OMP_NUM_THREADS/$OMPI_MCA_mpi_yield_when_idle"
trap 'echo got USR1; code=75; waits=' USR1
if [ -n "$waits" ]; then echo ready > ready; while [ -n "$waits" ]; do sleep 0.05; done; fi
if [ -n "$saves" ]; then
    mkdir -p runs/r/checkpoints
    printf 'step-%08d\\n' "$saves" > runs/r/checkpoints/latest
fi
[ -z "$finishes" ] || echo "{\\"steps\\": $finishes}" > runs/r/done
exit "${code:-0}"
"""
# Starts the program itself.
PTDMPI = f'#!/bin/bash\nexec {sys.executable} -m ptdmpi "$@"\n'
# Dies after step 5 at its first start, when node b is lost; then no program starts on b.
LOSES_B = """#!/bin/bash
case "$*" in
    *" true") [ ! -e lost ] || [[ "$*" != *"--hosts b "* ]]; exit ;;
    --version | *" rm "*) exit ;;
esac
echo "$*" >> calls
if [ -e lost ]; then
    echo '{"steps": 9}' > runs/r/done
else
    touch lost
    echo '{"step": 5, "loss": 1.0, "rank_count": 8}' > runs/r/metrics.jsonl
    kill -9 $$
fi
"""
PRINTS = '#!/bin/bash\necho "$(basename "$0") $*$state"; exit "${refused:-0}"\n'
# `flux run` starts ranks, and `flux --parent batch` submits a job.
FLUX = """#!/bin/bash
[ "$1" = run ] || { echo "flux $*"; exit; }
exec srun "$@"
"""
CONFIG = """
[run]
name = "r"
steps = 9
[model]
layers = 2
hidden = 16
heads = 2
seq_length = 8
[batch]
global_size = 8
[[data.train]]
path = "train"
"""


def environment(home: Path, script: str, **env: str) -> dict[str, str]:
    """A project folder `home` with stand-ins, and the variables that the batch system would set."""
    (home / "jobs").mkdir(exist_ok=True)
    for name in ("run.sh", "mpi-env.sh", "run_directory.py"):
        shutil.copy(ROOT / "jobs" / name, home / "jobs")
    bin_ = home / ".venv/bin"
    bin_.mkdir(parents=True, exist_ok=True)
    stand_ins = {"ptdmpi": LAUNCHER, "python": f'#!/bin/bash\nexec {sys.executable} "$@"\n'}
    stand_ins |= dict.fromkeys(("mpirun", "srun", "mpiexec"), LAUNCHER)
    stand_ins |= dict.fromkeys(("scontrol", "qsub", "bsub"), PRINTS)
    stand_ins["flux"] = FLUX
    for name, text in stand_ins.items():
        (bin_ / name).write_text(text)
        (bin_ / name).chmod(0o755)
    (home / "c.toml").write_text(CONFIG)
    (home / "nodes").write_text("a\na\nb\nb\n")
    system = {"SLURM_JOB_ID": "9", "SLURM_CPUS_PER_TASK": "8", "SLURM_SUBMIT_DIR": str(home)}
    if script.startswith("pbs"):
        system = {"PBS_JOBID": "9.pbs", "PBS_O_WORKDIR": str(home), "PBS_NODEFILE": "nodes"}
    elif script.startswith("lsf"):
        system = {"LSB_JOBID": "9", "LSB_MCPU_HOSTS": "a 4 b 4", "SCRIPT": "copy"}
        system["PTDMPI_HOME"] = str(home)
    elif script.startswith("flux"):
        system = {"FLUX_JOB_ID": "9", "PTDMPI_HOME": str(home)}
    elif not script.endswith(".sbatch"):
        system = {"PTDMPI_HOME": str(home)}
    path = f"{bin_}:{os.environ['PATH']}"
    kept = {"PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    return kept | {"PATH": path, "VIRTUAL_ENV": str(home / ".venv")} | system | env


def start(
    home: Path, script: str, *args: str, programs: Mapping[str, str] = {}, **env: str
) -> subprocess.CompletedProcess[str]:
    """Run a script of jobs/ as its batch system would: a copy of it, in `home`. `programs` replace
    the stand-ins of these names."""
    variables = environment(home, script, **env)
    for name, text in programs.items():
        (home / ".venv/bin" / name).write_text(text)
    if script == "cpu-mpirun.sh":
        shutil.copy(ROOT / "jobs" / script, home / "jobs")
        script = str(home / "jobs" / script)
    else:
        script = str(shutil.copy(ROOT / "jobs" / script, home / "copy"))
    command = ["bash", script, *args]
    return subprocess.run(
        command, cwd=home, env=variables, capture_output=True, text=True, timeout=20, check=False
    )


def lines(done: subprocess.CompletedProcess[str]) -> list[str]:
    """What was called; not what run.sh says."""
    return [line for line in done.stdout.splitlines() if not line.startswith("== ")]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_bash_accepts(script):
    subprocess.run(["bash", "-n", str(script)], check=True)


@NEEDS_SHELLCHECK
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_shellcheck_finds_no_mistake(script):
    assert shellcheck(script.read_text()) == ""


@pytest.mark.cases(3)
@pytest.mark.parametrize(
    ("settings", "end", "requeued"),
    [
        ({"saves": "9", "finishes": "9"}, 0, False),
        ({"saves": "9", "finishes": "9", "code": "1"}, 0, False),  # a launcher that ends badly
        ({"saves": "5", "finishes": "5"}, 1, True),  # the end of a run that now has more steps
        ({"saves": "5", "code": "75"}, 75, True),
        ({"saves": "5", "code": "1"}, 1, True),
        ({"saves": "5"}, 1, True),  # a launcher's 0 is no proof
        ({"code": "2"}, 2, False),
        ({"code": "3"}, 3, False),
        ({"code": "4"}, 4, True),
    ],
)
def test_requeues_until_complete(tmp_path, settings, end, requeued):
    done = start(tmp_path, "slurm-gpu.sbatch", "c.toml", "--set", "run.seed=1", **settings)
    called = lines(done)
    assert done.returncode == end, done.stdout + done.stderr
    train = f"{tmp_path}/.venv/bin/ptdmpi train c.toml --set run.seed=1: 8/1/"
    assert called[0] == f"srun --mpi=pmix {train}"
    assert called[1:] == ["scontrol requeue 9"] * requeued


@pytest.mark.long
def test_gives_up_where_nothing_is_saved(tmp_path):
    """Attempts without a new checkpoint end the job; a new checkpoint, or job, counts anew."""

    def attempt(**env: str) -> int:
        return len(lines(start(tmp_path, "slurm-cpu.sbatch", "c.toml", MAX_ATTEMPTS="3", **env)))

    failing = {"code": "1"}
    assert [attempt(**failing) for _ in range(3)] == [2, 2, 1]
    assert attempt(**failing) == 0  # Slurm itself requeued it: not even started
    assert attempt(**failing, SLURM_JOB_ID="10") == 2
    assert [attempt(**failing, saves=f"{step}", SLURM_JOB_ID="10") for step in (1, 2, 3, 4)] == [
        2
    ] * 4


def test_array_task_requeues_itself_alone(tmp_path):
    task = {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "3", "code": "75"}
    done = start(tmp_path, "slurm-gpu.sbatch", "c.toml", "--set", "run.name=s%a", **task)
    assert "train c.toml --set run.name=s3:" in done.stdout
    assert lines(done)[-1] == "scontrol requeue 7_3"
    assert (tmp_path / "runs/s3").is_dir()


def test_where_requeue_is_refused(tmp_path):
    done = start(tmp_path, "slurm-gpu.sbatch", "c.toml", code="75", refused="1")
    assert done.returncode == 75 and "submit it again" in done.stdout


@pytest.mark.parametrize(
    ("number", "state", "requeued"),
    [
        (signal.SIGUSR1, "", True),
        (signal.SIGTERM, " Reason=None", False),
        (signal.SIGTERM, " Reason=TimeLimit", True),
    ],
)
def test_signals_reach_the_ranks(tmp_path, number, state, requeued):
    """The warning is handed on, and the job requeued; a cancelled job saves and stays cancelled."""
    script = shutil.copy(ROOT / "jobs/slurm-gpu.sbatch", tmp_path / "copy")
    variables = environment(tmp_path, "slurm-gpu.sbatch", waits="yes", state=state)
    command = ["bash", str(script), "c.toml"]
    with subprocess.Popen(
        command, cwd=tmp_path, env=variables, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            while not (tmp_path / "ready").exists():
                assert process.poll() is None
            process.send_signal(number)
            output, _ = process.communicate(timeout=20)
        finally:
            process.kill()
    assert process.returncode == 75 and "got USR1" in output
    assert ("scontrol requeue 9" in output) == requeued


def test_pbs_job_submits_its_successor(tmp_path):
    """PBS lets operators alone rerun a job."""
    settings = {"ARGS": "c.toml --set run.seed=1", "saves": "5", "code": "75"}
    done = start(tmp_path, "pbs-gpu.sh", **settings)
    called = lines(done)
    launcher = "--launcher mpiexec --depth 8 --cpu-bind depth"
    assert called[0].startswith(f"ptdmpi run {launcher} -n 8 --hosts a:4,b:4 c.toml --set run.seed")
    assert "qsub -W depend=afterany:9.pbs -v ARGS,PTDMPI_CHAIN jobs/pbs-gpu.sh" in done.stdout
    finished = start(tmp_path, "pbs-gpu.sh", **settings | {"finishes": "9", "code": "0"})
    assert finished.returncode == 0 and "qsub" not in finished.stdout
    last = start(tmp_path, "pbs-gpu.sh", **settings)  # of a chain: nothing to do
    assert last.returncode == 0 and lines(last) == []


@pytest.mark.parametrize(
    ("script", "started", "successor"),
    [
        (
            "lsf-gpu.sh",
            "ptdmpi run --launcher mpirun -n 8 --hosts a:4,b:4 c.toml --set run.seed=1:",
            "bsub -w ended(9)",
        ),
        (
            "flux-gpu.sh",
            "srun run --setopt=cpu-affinity=per-task --nodes=2 --tasks-per-node=4 --exclusive "
            "--setopt=gpu-affinity=off {}/.venv/bin/ptdmpi train c.toml --set run.seed=1:",
            "flux --parent batch --dependency=afterany:9 jobs/flux-gpu.sh",
        ),
    ],
)
def test_jobs_of_lsf_and_flux_submit_their_successors(tmp_path, script, started, successor):
    settings = {"ARGS": "c.toml --set run.seed=1", "saves": "5", "code": "75"}
    done = start(tmp_path, script, **settings)
    assert done.returncode == 75, done.stderr
    assert lines(done)[0].startswith(started.format(tmp_path)), done.stdout
    assert f"next: {successor}" in done.stdout
    finished = start(tmp_path, script, **settings | {"finishes": "9", "code": "0"})
    assert finished.returncode == 0 and "next:" not in finished.stdout


def test_ranks_start_in_a_container(tmp_path):
    words = "apptainer exec --nv a.sif"
    done = start(tmp_path, "slurm-gpu.sbatch", "c.toml", CONTAINER=words, code="2")
    assert lines(done)[0].startswith(f"srun --mpi=pmix {words} ptdmpi train c.toml:")


def test_mpirun_shares_cores_only_where_ranks_outnumber_them(tmp_path):
    def yields(**env: str) -> bool:
        done = start(tmp_path, "cpu-mpirun.sh", "c.toml", **env)
        assert f"ptdmpi run --launcher mpirun -n {env['RANKS']} c.toml" in done.stdout, done.stderr
        return lines(done)[0].endswith("/1")

    assert not yields(RANKS="1")
    assert yields(RANKS="100000")


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "script",
    ["pbs-gpu.sh", pytest.param("cpu-mpirun.sh", marks=pytest.mark.long), "slurm-cpu.sbatch"],
)
def test_lost_ranks_start_again_within_the_job(tmp_path, script):
    """The supervisor itself, with a launcher of MPICH: the ranks are killed, and node b is lost."""
    programs = {"ptdmpi": PTDMPI, "mpiexec": LOSES_B}
    settings = {"LAUNCH": "mpiexec --depth 2", "RANKS": "8", "HOSTS": "a:4,b:4,c:4"}
    if script.startswith("pbs"):
        settings |= {"ARGS": "c.toml", "HOSTS": ""}
        (tmp_path / "hosts").write_text("a\na\nb\nc\n")
        settings["PBS_NODEFILE"] = "hosts"
    done = start(tmp_path, script, "c.toml", programs=programs, **settings)
    assert done.returncode == 0, done.stdout + done.stderr
    calls = (tmp_path / "calls").read_text().splitlines()
    assert [call.partition(" /")[0] for call in calls] == [
        "--depth 2 -n 8 --ppn 4 --hosts a,b",
        "--depth 2 -n 8 --ppn 4 --hosts a,c",
    ]
    assert "after step 5; lost: b; starting 8 ranks again" in done.stderr
    assert not any(line.startswith(("qsub", "scontrol")) for line in lines(done))


def test_mpirun_alone_is_not_started_again(tmp_path):
    done = start(tmp_path, "cpu-mpirun.sh", "c.toml", saves="5", code="1", SLURM_JOB_ID="9")
    assert done.returncode == 1 and len(lines(done)) == 1


@pytest.mark.parametrize("script", TEMPLATES)
def test_without_configuration_shows_usage(tmp_path, script):
    done = start(tmp_path, script)
    assert done.returncode == 2 and done.stderr.startswith("usage: ")


@pytest.mark.parametrize("setting", ["run.steps=0", "run.name", "run.stepz=1"])
def test_bad_configuration_is_one_line(tmp_path, setting):
    done = start(tmp_path, "slurm-gpu.sbatch", "c.toml", "--set", setting)
    assert done.returncode == 2 and lines(done) == []
    assert done.stderr.startswith("ptdmpi: error: ") and done.stderr.count("\n") == 1
