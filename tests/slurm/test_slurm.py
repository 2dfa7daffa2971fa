"""The templates of jobs/ on a real Slurm: time limits, lost nodes and ranks, cancelling, chains.

`make test-slurm` runs all of it; `make test-long` only `test_requeue_in_short`, where there is a
Slurm.
"""

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from tests.parallel import ROOT
from tests.slurm.cluster import Cluster, missing, wait_until
from tests.slurm.runs import Run, assert_same_bits, corpus

REASON = missing()
pytestmark = pytest.mark.skipif(bool(REASON), reason=f"no Slurm: {REASON}")
slow = pytest.mark.slurm
TEMPLATES = sorted(path.name for path in ROOT.glob("jobs/*.sbatch"))
PMIX = "srun --mpi=pmix"  # Cray's templates name Cray's plugin
COMPLETE_LIMIT_S = 600.0
SHORT = (
    "run.steps=60",
    "model.hidden=32",
    "model.layers=2",
    "checkpoint.every_steps=0",
)
LAST = "step-00000060"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with Cluster(tmp_path_factory.mktemp("slurm") / "sim") as virtual:
        yield virtual


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return corpus(tmp_path_factory.mktemp("corpus") / "c")


@pytest.fixture(scope="module")
def straight(folder):
    run = Run(folder, "straight")
    run.undisturbed()
    return run


@pytest.fixture
def announce(capsys):
    """Prints a measured time."""

    def say(what: str, seconds: float) -> None:
        with capsys.disabled():
            print(f"\n{what}: {seconds:.1f} s")

    return say


@pytest.fixture
def whole(cluster):
    """The cluster with all its nodes up and idle, before and after the test."""
    yield cluster
    cluster.run("scancel", "--user=root")
    for node in cluster.nodes:
        if node not in cluster.daemons:
            cluster.restore(node)
    cluster.wait_for_nodes(cluster.nodes)


def _rank(run: Run, variable: str) -> int:
    """The process id of the rank of `run` whose environment has this VARIABLE=VALUE."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if run.settings[0].encode() in (process / "cmdline").read_bytes().split(b"\0"):
                environment = (process / "environ").read_bytes().split(b"\0")
                if variable.encode() in environment:
                    return int(process.name)
        except (FileNotFoundError, ProcessLookupError):
            continue  # it ended meanwhile
    raise AssertionError(f"no rank with {variable}")


@pytest.mark.long
def test_requeue_in_short(whole, folder):
    """Asked to stop, the job saves, requeues itself, and ends with the bits of its twin."""
    twin = Run(folder, "short-straight", *SHORT)
    twin.undisturbed()
    run = Run(folder, "short", *SHORT)
    run.submit(whole)
    run.wait_for_step(2)
    whole.run("scancel", "--batch", "--signal=USR1", run.job)
    run.wait_for_log("is complete", COMPLETE_LIMIT_S)
    assert "exit code 75," in run.log and "resumed after step" in run.log
    assert whole.job(run.job)["Restarts"] == "1"
    assert_same_bits(run, twin)


@slow
@pytest.mark.parametrize("template", TEMPLATES)
def test_templates_are_accepted(cluster, template, folder):
    script = str(ROOT / "jobs" / template)
    accepted = cluster.run("sbatch", "--test-only", script, "config.toml", cwd=folder)
    assert "to start at" in accepted.stderr
    refused = cluster.run("sbatch", "--test-only", "--nodes=5", script, cwd=folder, check=False)
    assert refused.returncode != 0  # the lint is not blind


@slow
def test_submitted_by_command(whole, folder, straight):
    """`ptdmpi submit --now` with a site file: the job trains with the bits of its twin."""
    run = Run(folder, "ptdmpi-config")  # the name of the job, which is that of its log
    run.submit_by_command(whole)
    run.wait_for_log("is complete", COMPLETE_LIMIT_S)
    assert_same_bits(run, straight)


@slow
def test_time_limit(whole, folder):
    """Slurm's own warning before the time limit, as often as it takes."""
    twin = Run(folder, "long-straight", "run.steps=300")
    twin.undisturbed()
    run = Run(folder, "long", "run.steps=300")
    run.submit(whole, "--time=1", "--signal=B:USR1@30")
    run.wait_for_log("is complete", COMPLETE_LIMIT_S)
    assert run.log.count("exit code 75,") >= 1
    assert_same_bits(run, twin)


@slow
def test_time_limit_without_a_warning(whole, folder):
    """SIGTERM at the limit: the ranks save within KillWait, the job requeues itself."""
    run = Run(folder, "late", "run.steps=100000")
    run.submit(whole, "--time=1", "--signal=B:CONT@1")
    run.wait_for_log("attempt 1 of 5 from step", 240)
    assert "DUE TO TIME LIMIT" in run.log and "exit code 75," in run.log


@slow
@pytest.mark.parametrize(
    ("place", "template"),
    [("other", "slurm-infiniband.sbatch"), ("batch", "slurm-slingshot-nvidia.sbatch")],
)
def test_node_cut_off(whole, folder, straight, announce, place, template):
    """A node loses its power in the middle of a step: the job goes on elsewhere by itself."""
    run = Run(folder, f"cut-{place}")
    run.submit(whole, template=template, LAUNCH=PMIX)
    run.wait_for_step(50)
    hosts = whole.hosts_of(run.job)
    whole.cut(hosts[0 if place == "batch" else -1])
    announce(f"node lost ({place}), to the next step", run.wait_for_attempt(2))
    run.wait_for_log("is complete", COMPLETE_LIMIT_S)
    assert_same_bits(run, straight)


@slow
def test_rank_killed(whole, folder, straight, announce):
    """kill -9 of one rank: the step ends, the job requeues itself."""
    run = Run(folder, "killed")
    run.submit(whole, template="slurm-slingshot-amd.sbatch", LAUNCH=PMIX)
    run.wait_for_step(50)
    os.kill(_rank(run, "SLURM_PROCID=1"), signal.SIGKILL)
    announce("rank lost, to the next step", run.wait_for_attempt(2))
    run.wait_for_log("is complete", COMPLETE_LIMIT_S)
    assert_same_bits(run, straight)


@slow
def test_cancelled_job_saves_and_stays_cancelled(whole, folder, straight):
    """scancel: SIGTERM, then SIGKILL. The job does not come back; handed in again, it goes on."""
    run = Run(folder, "cancelled")
    run.submit(whole, template="slurm-gpu.sbatch")
    run.wait_for_step(50)
    whole.run("scancel", run.job)
    run.wait_for_log("start it again to continue")
    assert int(run.saved.removeprefix("step-")) > 50
    time.sleep(8)  # a requeued job would start again by now
    assert whole.job(run.job)["JobState"] == "CANCELLED"
    assert "requeued" not in run.log
    run.submit(whole)
    run.wait_for_log("is complete", COMPLETE_LIMIT_S)
    assert "resumed after step" in run.log
    assert_same_bits(run, straight)


@slow
def test_mpirun_in_an_allocation(whole, folder, straight, announce):
    """mpirun in place of srun: the warning reaches all ranks, and a lost node is no success."""
    run = Run(folder, "mpirun")
    run.submit(whole, LAUNCH="mpirun")
    run.wait_for_step(50)
    whole.run("scancel", "--batch", "--signal=USR1", run.job)
    run.wait_for_attempt(2)
    assert "exit code 75," in run.log
    run.wait_for_step(90)
    whole.cut(whole.hosts_of(run.job)[-1])
    announce("node lost (mpirun), to the next step", run.wait_for_attempt(3))
    run.wait_for_log("is complete", COMPLETE_LIMIT_S)
    assert_same_bits(run, straight)


@slow
def test_supervised_job_goes_on_without_a_lost_node(whole, folder, straight, announce):
    """A node loses its power: the same job goes on from its neighbour's memory, on a spare node."""
    settings = ("checkpoint.memory_every_steps=1", "checkpoint.every_steps=0")
    run = Run(folder, "supervised", *settings)
    run.submit(whole, "--no-kill", "--nodes=3", RANKS="2")
    run.wait_for_step(50)
    hosts = whole.hosts_of(run.job)
    whole.cut(hosts[1])
    announce("node lost under ptdmpi run, to the next step", run.wait_for_attempt(2))
    wait_until((run.path / "done").exists, COMPLETE_LIMIT_S, f"done\n{run.log}")
    assert f"lost: {hosts[1]}" in run.log and "continues from the copy in memory" in run.log
    assert whole.job(run.job)["Restarts"] == "0"
    assert_same_bits(run, straight)


@slow
def test_gives_up(whole, folder):
    """Attempts that never bring a checkpoint come to an end."""
    run = Run(folder, "hopeless")
    run.submit(whole, LAUNCH="false", MAX_ATTEMPTS="2")
    run.wait_for_log("giving up")
    wait_until(lambda: whole.job(run.job)["JobState"] == "FAILED", 20, "FAILED")
    assert whole.job(run.job)["Restarts"] == "1"


@slow
def test_array(whole, folder):
    """One task of the array after the other; each has a run of its own and requeues alone."""
    run = Run(folder, "seed-%a", "run.seed=%a", *SHORT)
    run.submit(whole, "--array=0-1%1")
    tasks = [Run(folder, f"seed-{seed}", f"run.seed={seed}", *SHORT) for seed in (0, 1)]
    tasks[0].wait_for_step(2)
    whole.run("scancel", "--batch", "--signal=USR1", f"{run.job}_0")
    for task in tasks:
        twin = Run(folder, f"{task.path.name}-straight", *task.settings[1:])
        twin.undisturbed()
        wait_until(lambda task=task: task.saved == LAST, COMPLETE_LIMIT_S, task.path.name)
        assert_same_bits(task, twin)
    logs = [path.read_text() for path in folder.glob("seed-*.log")]
    assert sorted(log.count("exit code 75,") for log in logs) == [0, 1]


@slow
def test_chain(whole, folder):
    """Jobs that may not be requeued, one after the other; and a chain that breaks off."""
    run = Run(folder, "chain", *SHORT)
    run.submit(whole, "--no-requeue")
    first = run.job
    run.submit(whole, "--no-requeue", f"--dependency=afterany:{first}")
    run.wait_for_step(2)
    whole.run("scancel", "--batch", "--signal=USR1", first)
    run.wait_for_log("is complete", COMPLETE_LIMIT_S)
    assert "resumed after step" in run.log
    assert whole.job(first)["JobState"] == "FAILED"  # exit code 75 is no success for Slurm
    after = f"--dependency=afterok:{first}"
    run.submit(whole, after, "--kill-on-invalid-dep=yes")
    wait_until(lambda: whole.job(run.job)["JobState"] == "CANCELLED", 60, "CANCELLED")


DISTRIBUTED = """
import torch, torch.distributed as dist
import ptdmpi.comm.c10d
dist.init_process_group("ptdmpi")
total = torch.tensor([dist.get_rank() + 1.0])
dist.all_reduce(total)
print("sum", total.item(), "of", dist.get_world_size(), flush=True)
"""


@slow
def test_torch_distributed_under_srun(whole, tmp_path):
    """The backend for torch.distributed finds its ranks on two nodes, without mpirun."""
    script = tmp_path / "program.py"
    script.write_text(DISTRIBUTED)
    command = ("srun", "--mpi=pmix", "--nodes=2", "--ntasks=2", "--time=2", sys.executable)
    done = whole.run(*command, str(script), cwd=tmp_path)
    assert done.stdout.count("sum 3.0 of 2") == 2
