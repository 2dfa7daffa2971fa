"""Runs whose ranks share sequences lose a rank and go on, without a restart or by `ptdmpi run`."""

import os
import signal
from pathlib import Path

import pytest

from ptdmpi.config.choices import CONTEXT_METHODS
from tests._killed import LOST, check_close, command, disturbed, losses, prepare
from tests._mpirun import mpirun
from tests.supervise import _job
from tests.supervise._job import Job


def shared_by(method: str) -> tuple[str, ...]:
    """Return the settings of runs in which two ranks share each sequence by a method."""
    settings = ("batch.global_size=8", "run.reproducible=false", "parallel.context=2")
    return (*settings, f"parallel.context_method={method}")


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
@pytest.mark.parametrize("method", CONTEXT_METHODS)
def test_a_context_rank_is_lost_and_two_go_on(corpus, undisturbed, method):
    """Its neighbour has the same state, so the live state is whole; two ranks fill c = 2."""
    name = f"live-{method}"
    disturbed(corpus, 4, [(1, "op", 3)], f"run.name={name}", *shared_by(method))
    (line,) = losses(corpus / "runs" / name)
    assert "2 ranks continue (1 spare): t=1,c=2,p=1,d=1" in line and "from live state of" in line
    check_close(corpus / "runs" / name, undisturbed)


@pytest.mark.long
@pytest.mark.parametrize("zero", [1, 3])
@pytest.mark.parametrize("method", CONTEXT_METHODS)
def test_a_lost_shard_of_a_context_rank_comes_from_the_checkpoint(
    corpus, undisturbed, method, zero
):
    """Four shards over c = 2 and d = 2 become two."""
    name = f"zero-{zero}-{method}"
    settings = (f"run.name={name}", f"parallel.zero={zero}", *shared_by(method))
    disturbed(corpus, 4, [(1, "op", 4)], *settings)
    (line,) = losses(corpus / "runs" / name)
    assert f"t=1,c=2,p=1,d=1,v=1,b=1, ZeRO {zero} in 2 shards from checkpoint{LOST}" in line
    check_close(corpus / "runs" / name, undisturbed)


@pytest.mark.long
@pytest.mark.together
@pytest.mark.parametrize("method", CONTEXT_METHODS)
def test_a_killed_context_rank_is_started_anew(tmp_path, method):
    folder = _job.prepare(tmp_path / "job")
    settings = ("run.reproducible=false", "parallel.context=2", "parallel.zero=3")
    settings += (f"parallel.context_method={method}", "checkpoint.memory_every_steps=1")
    options = [word for setting in settings for word in ("--set", setting)]
    whole = ["-m", "ptdmpi", "train", "config.toml", "--set", "run.dir=whole", *options[:8]]
    mpirun(2, whole, cwd=folder, env=_job.environment())
    with Job(folder, _job.words("-n", "2", *options, run="killed")) as job:
        job.wait_for("step 10/24")
        os.kill(job.ranks()[1], signal.SIGKILL)
        assert job.wait() == 0, job.text()
    assert "continues from the copy in memory of step" in job.text()
    _job.same(folder / "killed", folder / "whole")
