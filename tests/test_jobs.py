"""The job scripts: they parse, and hand on arguments, environment and exit codes."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.parallel import ROOT

SCRIPTS = sorted([*ROOT.glob("jobs/*.sh"), *ROOT.glob("jobs/*.sbatch"), ROOT / ".ci" / "run"])


def start(folder: Path, script: str, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a script of jobs/ with mpirun, srun and scontrol that only print how they are called."""
    for name in ("mpirun", "srun", "scontrol"):
        program = folder / name
        variables = "$SRUN_CPUS_PER_TASK/$OMP_NUM_THREADS/$OMPI_MCA_mpi_yield_when_idle"
        call = f'echo "{name} $*: {variables}"; exit "${{{name}_code:-0}}"'
        program.write_text(f"#!/bin/bash\n{call}\n")
        program.chmod(0o755)
    clean = {"PATH": f"{folder}:{os.environ['PATH']}", "VIRTUAL_ENV": str(folder), **env}
    command = ["bash", str(ROOT / "jobs" / script), *args]
    return subprocess.run(
        command, cwd=folder, env=clean, capture_output=True, text=True, timeout=20, check=False
    )


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_bash_accepts(script):
    subprocess.run(["bash", "-n", str(script)], check=True)


@pytest.mark.parametrize(
    ("code", "last", "end"), [(0, "srun", 0), (75, "scontrol requeue 9", 0), (3, "srun", 3)]
)
def test_slurm_requeues_what_stopped_on_request(tmp_path, code, last, end):
    settings = {"SLURM_CPUS_PER_TASK": "8", "SLURM_JOB_ID": "9", "srun_code": str(code)}
    done = start(tmp_path, "slurm-gpu.sbatch", "c.toml", "--set", "a=1 2", **settings)
    lines = done.stdout.splitlines()
    assert done.returncode == end and lines[-1].startswith(last)
    assert lines[0] == "srun --mpi=pmix --kill-on-bad-exit=1 ptdmpi train c.toml --set a=1 2: 8/1/"


def test_mpirun_shares_cores_only_where_ranks_outnumber_them(tmp_path):
    def yields(**env: str) -> bool:
        done = start(tmp_path, "cpu-mpirun.sh", "c.toml", **env)
        assert "ptdmpi train c.toml" in done.stdout, done.stderr
        return done.stdout.endswith("/1\n")

    assert not yields(RANKS="1")
    assert yields(RANKS="100000")
    assert not yields(RANKS="100000", SLURM_JOB_ID="9")


@pytest.mark.parametrize("script", ["slurm-gpu.sbatch", "cpu-mpirun.sh"])
def test_without_configuration_shows_usage(tmp_path, script):
    done = start(tmp_path, script)
    assert done.returncode == 2 and done.stderr.startswith("usage: ")
