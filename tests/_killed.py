"""Runs of a small model that lose ranks by SIGKILL at chosen places of a step."""

import json
import sys
from pathlib import Path

import numpy as np

from ptdmpi.data.shard_writer import ShardWriter
from tests._runs import records, tensors
from tests.parallel import ROOT, mpirun

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
LOST = ", since no other rank held the lost shard of the state,"

# KILLS: [rank, place, step], ...; ranks as started, steps from 1. A process does all of its work
# before the place where it dies; the progress of other ranks at that moment is left to chance.
KILLER = """
import json, os, signal, sys
from ptdmpi.cli import main
from ptdmpi.comm import launch
launch.prepare()
from ptdmpi.engine import engine, optimizer, runner
from ptdmpi.model import sharded, stage, state
from ptdmpi.engine.data_parallel import decentralized, feedback, local
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
die_in(stage.Stage, "weight_microbatch", "weights")
die_in(optimizer.Optimizer, "step", "before the update")
die_in(state.State, "changed", "before the weights")
die_in(sharded.GatheredWeights, "_gather", "gather")
die_in(sharded.ReducedGradients, "end", "reduction")
die_in(loop.Loop, "_record", "record")
die_in(validation.Validation, "after_step", "validation")
die_in(checkpoint.Checkpoints, "_written", "save")
die_in(live, "take", "recovery")
die_in(decentralized.Decentralized, "_averaged_parts", "mixing")
die_in(local.Local, "after_update", "mixing")
die_in(feedback.CompressedTiles, "write", "coding", after=True)
step_of = engine.Engine.step
def counted(self, number, batches):
    now[0] = number + 1
    return step_of(self, number, batches)
engine.Engine.step = counted
main()
"""


def prepare(folder: Path) -> None:
    """Write a configuration, and shards of tokens for training and validation."""
    _shard(folder / "train", 4000, 1)
    _shard(folder / "valid", 500, 2)
    (folder / "config.toml").write_text(CONFIG)


def _shard(folder: Path, tokens: int, seed: int) -> None:
    folder.mkdir()
    ids = np.random.default_rng(seed).integers(0, 52, tokens)
    with ShardWriter(folder / "shard-00000.h5", "t", "0" * 64, vocab_size=53, eod_id=52) as writer:
        writer.write(ids, np.array([tokens]))


def command(first: str, second: str, *settings: str) -> list[str]:
    """Return the words of `FIRST SECOND train config.toml` with each setting as --set."""
    options = [word for setting in settings for word in ("--set", setting)]
    return [first, second, "train", "config.toml", *options]


def disturbed(
    folder: Path, ranks: int, kills: list, *settings: str, check: bool = True, first: str = ""
):
    """Train under mpirun with `kills`; `first`: lines of Python before the program."""
    return mpirun(
        ranks,
        command("-c", first + KILLER, "run.on_failure=shrink", *settings),
        options=("--with-ft", "ulfm"),
        env={"KILLS": json.dumps(kills), "PYTHONPATH": ":".join([str(ROOT), *sys.path])},
        cwd=folder,
        check=check,
        timeout_s=100,
    )


def check_same(run: Path, undisturbed: Path) -> None:
    """Check that each step is recorded once, and that losses and final state agree to the bit."""
    keys = ("step", "loss", "grad_norm", "learning_rate", "validation_loss")
    found, expected = (
        # a run that resumes on fewer ranks records once that its layout has changed
        [
            {key: record[key] for key in keys if key in record}
            for record in records(path)
            if "changed" not in record
        ]
        for path in (run, undisturbed)
    )
    assert found == expected
    last = "checkpoints/step-00000006"
    wanted, got = tensors(undisturbed / last), tensors(run / last)
    assert wanted.keys() == got.keys()
    for name, values in wanted.items():
        np.testing.assert_array_equal(got[name], values, err_msg=name)


def check_close(run: Path, undisturbed: Path) -> None:
    """Check that each step is recorded once, and that losses and final state agree to rounding."""
    found, expected = (
        [(one["step"], one["loss"]) for one in records(path) if "loss" in one]
        for path in (run, undisturbed)
    )
    assert [step for step, _ in found] == [step for step, _ in expected]
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    last = "checkpoints/step-00000006"
    wanted, got = tensors(undisturbed / last), tensors(run / last)
    assert wanted.keys() == got.keys()
    for name, values in wanted.items():
        # the first steps of Adam divide numbers near 0 by each other
        scale = np.abs(values).max()
        assert np.abs(got[name] - values).max() <= 1e-2 * scale + 1e-7, name


def losses(run: Path) -> list[str]:
    """Return the lines of the log on lost ranks."""
    return [line for line in (run / "log.txt").read_text().splitlines() if " lost" in line]
