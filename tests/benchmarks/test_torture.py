"""The torture of runs: a few of its trials, and that it sees what is lost."""

import json
import random
import shutil
from pathlib import Path

import pytest

from benchmarks.faults import torture as program
from benchmarks.faults.layouts import (
    KINDS,
    LAYOUTS,
    REMOUNTED,
    SHRINKING,
    Deck,
    Weighted,
    kinds_of,
    layout,
)
from benchmarks.faults.tally import Outcome, table
from benchmarks.faults.torture import Lost, Torture, kinds, trial
from benchmarks.faults.training import StartedRun, Way, newest_sound
from ptdmpi.checkpoint import directory as files
from ptdmpi.checkpoint.manifest import checksum
from ptdmpi.config import load, resolve
from tests.parallel import mpi_environment

CASE = Way("p=2", 2, ("parallel.pipeline=2", "checkpoint.asynchronous=true"))


@pytest.fixture(scope="module")
def torture(tmp_path_factory) -> Torture:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in mpi_environment().items():
            patch.setenv(name, value)
        yield Torture(tmp_path_factory.mktemp("torture") / "torture", seed=3)


@pytest.mark.long
def test_a_run_killed_again_and_again_ends_as_if_undisturbed(torture, tmp_path):
    """Between the rename and `latest`, in the middle of a file, in the middle of a removal."""
    run, saved = tmp_path / "run", 0
    for death in (("latest", 2, 0), ("write", 8, 1), ("discard", 1, 0)):
        training = StartedRun(torture.folder, CASE, run, death)
        assert training.wait() not in (0, 2), training.text()
        saved = max(saved, training.saved())  # this start may have died in its first save
        assert newest_sound(run) >= saved
    assert saved >= program.EVERY_STEPS
    torture.finish(CASE, run, saved)


def test_what_was_reported_as_saved_must_be_there(torture, tmp_path):
    with pytest.raises(Lost, match="step 8 was reported as saved, but 0 is the newest"):
        torture.finish(CASE, tmp_path, 8)


@pytest.mark.long
def test_other_bits_are_a_loss(torture, tmp_path, monkeypatch):
    """The end of the reference run with one step's checkpoint in the place of the last one."""
    run = tmp_path / "run"
    shutil.copytree(torture.reference(CASE), run)
    last = run / "checkpoints" / files.name_of(program.STEPS)
    shutil.rmtree(last)
    shutil.copytree(last.with_name(files.name_of(program.EVERY_STEPS)), last)
    manifest = json.loads((last / "manifest.json").read_text())
    manifest["progress"]["step"] = program.STEPS
    del manifest["crc32"]
    (last / "manifest.json").write_text(json.dumps(manifest | {"crc32": checksum(manifest)}))
    monkeypatch.setattr(program, "StartedRun", _Done)
    with pytest.raises(Lost, match="tensors differ"):
        torture.finish(CASE, run, 0)


class _Done:
    """A start that has nothing to do."""

    def __init__(self, folder: Path, case: Way, run: Path, death: tuple) -> None:
        self.code = 0

    def wait(self) -> int:
        return self.code


def test_all_kinds_are_tried_often_enough(torture):
    numbers = {name: number for name, (number, _) in kinds(torture).items()}
    assert sum(number for name, number in numbers.items() if name.startswith("kill")) >= 50
    assert all(numbers[name] >= 20 for name in ("truncate", "flip", "full", "read-only"))


@pytest.mark.parametrize("layouts", [LAYOUTS, REMOUNTED, SHRINKING])
def test_layouts_can_be_trained_and_are_of_the_kinds_that_they_are_counted_under(torture, layouts):
    for _, way in layouts:
        config = resolve(load(torture.folder / "config.toml", way.settings), way.ranks)
        found = config.parallel
        expected = ["whole" if found.zero == 0 else f"zero-{found.zero}"]
        expected += ["groups"] * (found.shard_group != "all")
        expected += ["offloaded"] * (found.offload != "none")
        expected += ["adapted"] * config.adapt.adapts
        assert kinds_of(way) == tuple(expected), way.name
        sizes = dict(word.split("=") for word in way.name.split(","))
        assert int(sizes.get("d", found.data)) == found.data, way.name


def test_a_deck_deals_all_its_cards_before_one_comes_again():
    cards = [Weighted(2, layout("zero=1", 2)), Weighted(1, layout("p=2", 2))]
    deck = Deck(random.Random(1), cards)
    for _ in range(5):
        assert sorted(deck.deal().name for _ in range(3)) == ["p=2", "zero=1", "zero=1"]
    only = Deck(random.Random(1), cards, ["whole"])
    assert {only.deal().name for _ in range(3)} == {"p=2"}


def test_every_kind_of_layout_is_met_in_a_deck():
    assert {kind for _, way in LAYOUTS for kind in kinds_of(way)} == set(KINDS)


def test_a_trial_says_which_layout_it_lost(tmp_path):
    torture = Torture(tmp_path / "torture", seed=1, kinds=["groups"])

    def work(run: Path) -> None:
        torture.case()
        raise Lost("step 8 is gone")

    outcome = trial(torture, work, "flip", 3)
    assert outcome.came == "lost"
    assert outcome.line() == f"flip-3: {outcome.way.name}: lost: step 8 is gone"
    assert "shard_group=2" in outcome.way.name


def test_counts_stand_by_fault_by_layout_and_by_both():
    both, whole = layout("zero=1,shard_group=2", 4), layout("p=2", 2)
    outcomes = [
        Outcome("flip", 0, whole, "survived"),
        Outcome("flip", 1, both, "lost", "why"),
        Outcome("flip", 2, both, "survived"),
        Outcome("full", 0, both, "refused"),
    ]
    rows = {line.split()[0]: line.split()[1:] for line in table(outcomes).splitlines()[:4]}
    assert rows["flip"] == ["3", "2", "0", "1"]
    assert rows["all"] == ["4", "2", "1", "1"]
    _, of_layouts, of_both = table(outcomes).split("\n\n")
    rows = {line.split()[0]: line.split()[1:] for line in of_layouts.splitlines()[1:]}
    assert rows["whole"] == ["1", "1", "0", "0"]
    assert rows["zero-1"] == rows["groups"] == ["3", "1", "1", "1"]
    assert rows["zero-3"] == ["0", "0", "0", "0"]
    rows = {line.split()[0]: line.split()[1:] for line in of_both.splitlines()[1:]}
    assert rows["flip"] == ["1/0", "2/1", "0/0", "0/0", "2/1", "0/0", "0/0"]
