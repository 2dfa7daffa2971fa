"""Ranks are killed with SIGKILL at chosen places; the others go on as if nothing had happened."""

import json
from pathlib import Path

import numpy as np
import pytest

from ptdmpi.data.shard_writer import ShardWriter
from tests._runs import records, tensors
from tests.parallel import mpirun

CONFIG = """
[run]
name = "t"
steps = 6
reproducible = true
[model]
layers = 2
hidden = 32
heads = 2
seq_length = 16
dropout = 0.1
[batch]
global_size = 6
[optimizer]
learning_rate = 1e-2
[data]
valid = "valid"
[[data.train]]
path = "train"
[checkpoint]
every_steps = 2
[log]
validate_every_steps = 2
validate_samples = 6
"""

# KILLS: [rank, place, step], ...; ranks as started, steps from 1. The work of a place is done by
# the process that dies there up to the place; what other ranks have done by then is left to chance.
KILLER = """
import json, os, signal, sys
from ptdmpi.cli import main
from ptdmpi.comm import launch
launch.prepare()
from ptdmpi.engine import engine, optimizer, runner
from ptdmpi.train import live, loop, recover, validation
from ptdmpi.checkpoint import save as checkpoint
me, now = int(os.environ["OMPI_COMM_WORLD_RANK"]), [0]
kills = [(place, step) for rank, place, step in json.loads(os.environ["KILLS"]) if rank == me]

def die_in(owner, name, place, after=False):
    work = getattr(owner, name)
    def patched(*arguments, **named):
        if after:
            result = work(*arguments, **named)
        if (place, now[0]) in kills:
            os.kill(os.getpid(), signal.SIGKILL)
        return result if after else work(*arguments, **named)
    setattr(owner, name, patched)

die_in(runner.Runner, "_compute", "op", after=True)
die_in(optimizer.Optimizer, "step", "before the update")
die_in(loop.Loop, "_record", "record")
die_in(validation.Validation, "after_step", "validation")
die_in(checkpoint.Checkpoints, "_written", "save")
die_in(live, "take", "recovery")
step = engine.Engine.step
def counted(self, number, batches):
    now[0] = number + 1
    return step(self, number, batches)
engine.Engine.step = counted
main()
"""


def _shard(folder: Path, tokens: int, seed: int) -> None:
    folder.mkdir()
    ids = np.random.default_rng(seed).integers(0, 52, tokens)
    with ShardWriter(folder / "shard-00000.h5", "t", "0" * 64, 53, 52) as writer:
        writer.write(ids, np.array([tokens]))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    _shard(folder / "train", 4000, 1)
    _shard(folder / "valid", 500, 2)
    (folder / "config.toml").write_text(CONFIG)
    return folder


@pytest.fixture(scope="module")
def undisturbed(corpus) -> Path:
    """The run on one rank: with `reproducible` every p and d has its bits."""
    mpirun(1, _command("-m", "ptdmpi", "run.name=straight"), cwd=corpus, timeout_s=100)
    return corpus / "runs/straight"


def _command(first: str, second: str, *settings: str) -> list[str]:
    options = [word for setting in settings for word in ("--set", setting)]
    return [first, second, "train", "config.toml", *options]


def _disturbed(folder: Path, ranks: int, kills: list, *settings: str, check: bool = True):
    return mpirun(
        ranks,
        _command("-c", KILLER, "run.on_failure=shrink", *settings),
        options=("--with-ft", "ulfm"),
        env={"KILLS": json.dumps(kills)},
        cwd=folder,
        check=check,
        timeout_s=100,
    )


def _check_same(run: Path, undisturbed: Path) -> None:
    """The records of each step once, losses and final state to the bit."""
    keys = ("step", "loss", "grad_norm", "learning_rate", "validation_loss")
    found, expected = (
        [{key: record[key] for key in keys if key in record} for record in records(path)]
        for path in (run, undisturbed)
    )
    assert found == expected
    last = "checkpoints/step-00000006"
    wanted, got = tensors(undisturbed / last), tensors(run / last)
    assert wanted.keys() == got.keys()
    for name, values in wanted.items():
        np.testing.assert_array_equal(got[name], values, err_msg=name)


def _losses(run: Path) -> list[str]:
    return [line for line in (run / "log.txt").read_text().splitlines() if " lost" in line]


def test_rank_0_is_lost_then_another_and_one_goes_on(corpus, undisturbed):
    """From the live state: in the middle of a step, and between a step's update and its record."""
    kills = [(0, "op", 2), (2, "record", 5)]
    _disturbed(corpus, 3, kills, "run.name=twice")
    first, second = _losses(corpus / "runs/twice")
    assert first.startswith("rank 0 (") and "lost in step 2; 2 ranks go on: t=1,p=1,d=2" in first
    assert "from live state of step 1, " in first
    assert second.startswith("rank 2 (") and "lost in step 5; 1 rank goes on: t=1,p=1,d=1" in second
    assert "from live state of step 5, " in second
    _check_same(corpus / "runs/twice", undisturbed)
    found = records(corpus / "runs/twice")
    # step 5 was trained by two ranks, and recorded by the one that was left
    assert [r["rank_count"] for r in found if "loss" in r] == [3, 2, 2, 2, 1, 1]


@pytest.mark.long
def test_a_spare_rank_takes_over_from_the_checkpoint(corpus, undisturbed):
    """The only holder of the second stage dies while step 4 is saved: step 2 is what there is."""
    _disturbed(
        corpus, 3, [(1, "save", 4)], "run.name=stage", "run.spare_ranks=1", "parallel.pipeline=2"
    )
    (line,) = _losses(corpus / "runs/stage")
    assert "lost in step 4; 2 ranks go on: t=1,p=2,d=1" in line
    assert "from checkpoint of step 2, " in line
    _check_same(corpus / "runs/stage", undisturbed)


def test_a_spare_rank_takes_the_live_state_and_one_is_lost_meanwhile(corpus, undisturbed):
    """Rank 1 dies in a validation; rank 3, that was to replace it, while it receives the state."""
    kills = [(1, "validation", 4), (3, "recovery", 0)]
    _disturbed(corpus, 4, kills, "run.name=meanwhile", "run.spare_ranks=1", "parallel.data=3")
    (line,) = _losses(corpus / "runs/meanwhile")
    assert line.startswith("ranks 1 (") and ", 3 (" in line
    assert "lost in step 4; 2 ranks go on: t=1,p=1,d=2" in line
    assert "from live state of step 4, " in line
    _check_same(corpus / "runs/meanwhile", undisturbed)


@pytest.mark.long
def test_too_few_ranks_end_and_the_same_command_resumes(corpus, undisturbed):
    settings = ("run.name=few", "parallel.pipeline=2")
    ended = _disturbed(corpus, 2, [(0, "before the update", 3)], *settings, check=False)
    assert ended.returncode not in (0, 2)
    lines = [line for line in ended.stderr.splitlines() if line.startswith("ptdmpi: error: ")]
    assert len(lines) == 1 and "1 rank cannot hold t=1,p=2" in lines[0], ended.stderr
    assert _losses(corpus / "runs/few") == [lines[0].removeprefix("ptdmpi: error: ")]
    _disturbed(corpus, 2, [], *settings)
    _check_same(corpus / "runs/few", undisturbed)


def test_a_launcher_that_would_end_the_job_is_refused(corpus):
    command = _command("-m", "ptdmpi", "run.name=plain", "run.on_failure=shrink")
    refused = mpirun(1, command, cwd=corpus, check=False, timeout_s=100)
    assert refused.returncode == 2
    assert "legal: mpirun --with-ft ulfm" in refused.stderr
    assert not (corpus / "runs/plain/checkpoints").exists()
