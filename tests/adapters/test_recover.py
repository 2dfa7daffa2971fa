"""Ranks are killed with SIGKILL while adapters train: the others have the frozen base, too."""

from pathlib import Path

import pytest

from tests import _stored
from tests._killed import LOST, check_close, check_same, command, disturbed, losses, prepare
from tests._runs import VOCAB_SIZE, tensors
from tests.parallel import mpirun

LORA = ("adapt.method=lora", "adapt.rank=3", "adapt.dropout=0.1", "adapt.base=base")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> Path:
    """The run on one rank, in a folder that has its base."""
    folder = tmp_path_factory.mktemp("adapted")
    prepare(folder)
    _stored.stored(folder / "base", VOCAB_SIZE, heads=2)
    words = command("-m", "ptdmpi", "run.name=straight", *LORA)
    mpirun(1, words, cwd=folder, timeout_s=100)
    return folder / "runs/straight"


@pytest.mark.long
def test_adapters_go_on_without_ranks_that_were_lost(undisturbed):
    """In an op the others keep what they have; while step 4 is saved all hold it, too."""
    runs, kills = undisturbed.parent, [(0, "op", 2), (2, "save", 4)]
    disturbed(runs.parent, 3, kills, "run.name=twice", *LORA)
    first, second = losses(runs / "twice")
    assert "lost in step 2; 2 ranks continue: t=1,p=1,d=2" in first
    assert "from live state of step 1, " in first
    assert "lost in step 4; 1 rank continues: t=1,p=1,d=1" in second
    assert "from live state of step 4, " in second
    check_same(runs / "twice", undisturbed)
    assert all(".lora_" in name for name in tensors(undisturbed / "checkpoints/step-00000006"))


@pytest.mark.long
def test_a_base_of_which_half_is_lost_is_read_again(undisturbed):
    """With `zero` = 3 its weights are in shards, as the adapters are."""
    runs = undisturbed.parent
    settings = ("run.name=shards", "run.reproducible=false", "parallel.zero=3", *LORA)
    disturbed(runs.parent, 2, [(1, "gather", 3)], *settings)
    (line,) = losses(runs / "shards")
    assert f"1 rank continues: t=1,p=1,d=1,v=1,b=1 from checkpoint{LOST} of step 2" in line
    check_close(runs / "shards", undisturbed)
