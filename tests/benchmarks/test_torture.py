"""The torture of runs: a few of its trials, and that it sees what is lost."""

import shutil
from pathlib import Path

import pytest

from benchmarks.faults import torture as program
from benchmarks.faults.torture import Lost, Torture, kinds
from benchmarks.faults.training import StartedRun, Way, newest_sound
from ptdmpi.checkpoint import directory as files
from tests.parallel import mpi_environment

CASE = Way("p=2", 2, ("parallel.pipeline=2", "checkpoint.asynchronous=true"))


@pytest.fixture(scope="module")
def torture(tmp_path_factory) -> Torture:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in mpi_environment().items():
            patch.setenv(name, value)
        patch.setattr(Torture, "case", lambda self: CASE)
        torture = Torture(tmp_path_factory.mktemp("torture") / "torture", seed=3)
        torture.reference(CASE)
        yield torture


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
    with pytest.raises(Lost, match="step 8 was reported as saved, step 0 is there"):
        torture.finish(CASE, tmp_path, 8)


def test_other_bits_are_a_loss(torture, tmp_path, monkeypatch):
    """The end of the reference run with one step's checkpoint in the place of the last one."""
    run = tmp_path / "run"
    shutil.copytree(torture.reference(CASE), run)
    last = run / "checkpoints" / files.name_of(program.STEPS)
    shutil.rmtree(last)
    shutil.copytree(last.with_name(files.name_of(program.EVERY_STEPS)), last)
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
