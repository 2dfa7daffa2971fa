"""Real ranks that are lost, and come back after a shrink, under `ptdmpi run`."""

import itertools
import os
import signal
from pathlib import Path

import pytest

from tests._mpirun import mpirun
from tests._runs import records
from tests.supervise._job import Job, environment, prepare, same, words

pytestmark = [pytest.mark.together, pytest.mark.long]
STEPS = 150  # of some 50 ms: the run must not end before it grows


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return prepare(tmp_path_factory.mktemp("job"))


@pytest.fixture(scope="module")
def undisturbed(folder):
    """The directory of a run of four ranks under plain mpirun that nothing has disturbed."""
    settings = ("--set", "run.dir=undisturbed", "--set", f"run.steps={STEPS}")
    mpirun(4, ["-m", "ptdmpi", "train", "config.toml", *settings], cwd=folder, env=environment())
    return folder / "undisturbed"


def grown(*settings: str, run: str, options: tuple[str, ...] = ()) -> list[str]:
    """Return the words of a job of four ranks that looks every second whether it can grow."""
    sets = [word for setting in settings for word in ("--set", setting)]
    steps = ("--set", f"run.steps={STEPS}")
    return words("-n", "4", "--grow-every", "1", *options, *steps, *sets, run=run)


def rank_counts(run: Path) -> list[int]:
    """Return the numbers of ranks that have trained one after the other."""
    counts = [one["rank_count"] for one in records(run) if "loss" in one]
    return [ranks for ranks, _ in itertools.groupby(counts)]


def test_a_run_that_has_shrunk_grows_back(folder, undisturbed):
    """Under ULFM the survivors go on from their live state; then the job saves and starts all four
    ranks again."""
    with Job(folder, grown("run.on_failure=shrink", run="shrunk")) as job:
        job.wait_for(f"step  20/{STEPS}")
        os.kill(job.ranks()[3], signal.SIGKILL)
        assert job.wait() == 0, job.text()
    text = job.text()
    assert "rank 3 (" in text and "from live state of step" in text, text
    assert "there is room for 4 ranks again" in text and "starting 4 ranks again" in text, text
    # three survivors: d = 2, and one waits
    assert rank_counts(folder / "shrunk") == [4, 2, 4]
    same(folder / "shrunk", undisturbed, STEPS)
