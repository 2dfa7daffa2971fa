"""When a run saves, and what it does when it cannot."""

from pathlib import Path

import pytest

from ptdmpi.checkpoint.save import Saved, SaveFailed
from ptdmpi.config import CheckpointConfig
from ptdmpi.train.hooks import Hooks
from ptdmpi.train.saving import Saving
from ptdmpi.watch.requests import Save


class _Disk:
    """Checkpoints on a disk that fails at some steps; `lag`: a save is complete at that many polls
    later, or fails then."""

    def __init__(self, every_steps: int, failing: set[int], lag: int = 0) -> None:
        self.config = CheckpointConfig(every_steps=every_steps, asynchronous=lag > 0)
        self.failing, self.lag = failing, lag
        self.flight: list[int] = []
        self.tried: list[int] = []

    def save(self, step: int) -> list[Saved]:
        self.tried.append(step)
        self.flight = [step, self.lag]
        return [] if self.lag else self.finish()

    def poll(self) -> list[Saved]:
        if not self.flight:
            return []
        self.flight[1] -= 1
        return self.finish() if self.flight[1] <= 0 else []

    def finish(self) -> list[Saved]:
        if not self.flight:
            return []
        step, self.flight = self.flight[0], []
        if step in self.failing:
            raise SaveFailed(f"step {step} was not written: full")
        return [Saved(Path(f"step-{step}"), step, 10**6, 0.1, 0.2)]


def _run(disk: _Disk, last_step: int, stop: int = 0, asked: int = 0) -> tuple[list[str], list[int]]:
    """Run to `last_step`, or stop after step `stop`; the user asks for a save after `asked`."""
    lines: list[str] = []
    records: list[dict] = []
    saving = Saving(
        disk,
        last_step,
        say=lines.append,
        record=lambda **values: records.append(values),
        verify=lambda: None,
        hooks=Hooks(),
    )
    for step in range(1, (stop or last_step) + 1):
        saving.after_step(step, {stop: Save.LAST, asked: Save.NOW}.get(step, Save.NO))
    return lines, [record["step"] for record in records]


@pytest.mark.parametrize("lag", [0, 1, 2, 7])
def test_due_steps_are_saved_and_reported(lag):
    disk = _Disk(5, set(), lag)
    lines, saved = _run(disk, 12)
    assert disk.tried == saved == [5, 10, 12]
    assert lines[0] == "saved step-5 (1.0 MB, stalled 0.10 s, written in 0.20 s)"


def test_no_interval_saves_at_the_end_and_on_request():
    assert _run(_Disk(0, set()), 7)[1] == [7]
    assert _run(_Disk(0, set(), 2), 7, stop=4)[1] == [4]


def test_a_failing_save_is_tried_again_soon_and_then_seldom():
    disk = _Disk(10, {10, 11, 13, 17, 20, 25})
    lines, saved = _run(disk, 40)
    assert disk.tried == [10, 11, 13, 17, 20, 30, 40] and saved == [30, 40]
    assert "warning: step 10 was not written: full; going on, next attempt after step 11" in lines
    assert "next attempt after step 30" in lines[4]


def test_after_a_success_it_is_tried_again_soon_once_more():
    disk = _Disk(10, {10, 20, 21})
    _run(disk, 40)
    assert disk.tried == [10, 11, 20, 21, 23, 30, 40]


def test_a_save_that_fails_in_the_background_does_not_keep_the_next_from_being_made():
    disk = _Disk(5, {5}, lag=9)
    lines, saved = _run(disk, 10)
    assert disk.tried == [5, 10] and saved == [10] and "warning: step 5" in lines[0]


@pytest.mark.parametrize("lag", [0, 3])
def test_a_save_that_a_user_asks_for_is_complete_and_may_fail(lag):
    """A file SAVE on a full disk must not end the run, whose state is only in memory."""
    disk = _Disk(0, {3}, lag)
    lines, saved = _run(disk, 9, asked=3)
    assert disk.tried == [3, 4, 9] and saved[-1] == 9
    assert lines[0] == "warning: step 3 was not written: full; going on, next attempt after step 4"
    lines, saved = _run(_Disk(0, set(), lag), 4, asked=3)
    assert saved == [3, 4] and len(lines) == 2


@pytest.mark.parametrize(("last_step", "stop"), [(6, 0), (20, 6)])
@pytest.mark.parametrize("lag", [0, 3])
def test_the_last_save_must_succeed(last_step, stop, lag):
    with pytest.raises(SaveFailed, match="step 6"):
        _run(_Disk(0, {6}, lag), last_step, stop)
