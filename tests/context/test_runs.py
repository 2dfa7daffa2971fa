"""Runs whose ranks share sequences lose a rank and go on, without a restart or by `ptdmpi run`."""

import os
import signal
from pathlib import Path

import pytest

from tests._killed import LOST, check_close, command, disturbed, losses, prepare
from tests._mpirun import mpirun
from tests.supervise import _job
from tests.supervise._job import Job

CONTEXT = ("batch.global_size=8", "run.reproducible=false", "parallel.context=2")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    prepare(folder)
    return folder


@pytest.fixture(scope="module")
def undisturbed(corpus) -> Path:
    """The run on one rank."""
    words = command("-m", "ptdmpi", "run.name=alone", "batch.global_size=8")
    mpirun(1, words, cwd=corpus, timeout_s=100)
    return corpus / "runs/alone"


@pytest.mark.long
def test_a_context_rank_is_lost_and_two_go_on(corpus, undisturbed):
    """Its neighbour has the same state, so the live state is whole; two ranks fill c = 2."""
    disturbed(corpus, 4, [(1, "op", 3)], "run.name=live", *CONTEXT)
    (line,) = losses(corpus / "runs/live")
    assert "2 ranks go on (1 spare): t=1,c=2,p=1,d=1" in line and "from live state of" in line
    check_close(corpus / "runs/live", undisturbed)


@pytest.mark.long
@pytest.mark.parametrize("zero", [1, 3])
def test_a_lost_shard_of_a_context_rank_comes_from_the_checkpoint(corpus, undisturbed, zero):
    """Four shards over c = 2 and d = 2 become two."""
    name = f"zero-{zero}"
    settings = (f"run.name={name}", f"parallel.zero={zero}", *CONTEXT)
    disturbed(corpus, 4, [(1, "op", 4)], *settings)
    (line,) = losses(corpus / "runs" / name)
    assert f"t=1,c=2,p=1,d=1,v=1,b=1, ZeRO {zero} in 2 shards from checkpoint{LOST}" in line
    check_close(corpus / "runs" / name, undisturbed)


@pytest.mark.long
@pytest.mark.together
def test_a_killed_context_rank_is_started_anew(tmp_path):
    folder = _job.prepare(tmp_path / "job")
    settings = ("run.reproducible=false", "parallel.context=2", "parallel.zero=3")
    settings += ("checkpoint.memory_every_steps=1",)
    options = [word for setting in settings for word in ("--set", setting)]
    whole = ["-m", "ptdmpi", "train", "config.toml", "--set", "run.dir=whole", *options[:6]]
    mpirun(2, whole, cwd=folder, env=_job.environment())
    with Job(folder, _job.words("-n", "2", *options, run="killed")) as job:
        job.wait_for("step 10/24")
        os.kill(job.ranks()[1], signal.SIGKILL)
        assert job.wait() == 0, job.text()
    assert "goes on from the copy in memory of step" in job.text()
    _job.same(folder / "killed", folder / "whole")
