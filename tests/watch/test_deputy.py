"""Rank 1 misses rank 0: it warns, takes the warning back, or ends the job."""

import os

import pytest

from ptdmpi.plan.layout.grid import training_grid
from ptdmpi.watch.deputy import Deputy
from ptdmpi.watch.whereabouts import Ranks
from tests._alarm import at_most


@pytest.fixture
def ranks() -> Ranks:
    return Ranks(training_grid(data=3), ["a", "b", "c"])


def test_a_silence_is_warned_of_once_and_its_end_is_told(ranks, tmp_path, capsys):
    deputy = Deputy(ranks, tmp_path, 60.0)
    deputy.hear(100.0)
    assert not any(deputy.replaces(100.0 + seconds) for seconds in (9.0, 12.0, 30.0))
    deputy.hear(131.0)
    said = capsys.readouterr().err.splitlines()
    assert said == [
        "warning: rank 0 (a) has not reported for 12 s, says rank 1 (b)",
        "rank 0 (a) reports again after 31 s",
    ]
    assert (tmp_path / "log.txt").read_text().splitlines() == said


@pytest.mark.parametrize(("stall_s", "after_s"), [(60.0, 61.0), (1.0, 6.0)])
def test_the_job_is_ended_in_its_place(ranks, tmp_path, capsys, stall_s, after_s):
    """It ends after `stall_s`, but not before LEAST_SILENCE_S."""
    deputy = Deputy(ranks, tmp_path, stall_s)
    deputy.hear(100.0)
    assert not deputy.replaces(100.0 + after_s - 2.0)
    assert deputy.replaces(100.0 + after_s)
    capsys.readouterr()
    deputy.pronounce(100.0 + after_s)
    line = f"stall: rank 0 (a) has not reported for {after_s:.0f} s: its process is stopped"
    assert capsys.readouterr().err.startswith(line)


def test_a_log_that_became_a_pipe_does_not_stop_the_deputy(ranks, tmp_path, capsys):
    os.mkfifo(tmp_path / "log.txt")
    deputy = Deputy(ranks, tmp_path, 60.0)
    deputy.hear(100.0)
    with at_most(5):
        deputy.replaces(112.0)
    assert capsys.readouterr().err.startswith("warning: rank 0 (a) has not reported")


def test_whom_rank_0_does_not_talk_to_does_not_miss_it(ranks, tmp_path, capsys):
    deputy = Deputy(ranks, tmp_path, 1.0)
    deputy.wake(1e6)
    assert not deputy.replaces(1e9) and capsys.readouterr().err == ""


def test_a_process_that_was_stopped_itself_has_missed_nobody(ranks, tmp_path):
    deputy = Deputy(ranks, tmp_path / "gone", 10.0)  # no log to write to: no matter
    deputy.hear(100.0)
    deputy.wake(500.0)
    assert not deputy.replaces(501.0)
    deputy.wake(500.0)
    assert deputy.replaces(511.0)


def test_stalls_are_off(ranks, tmp_path):
    deputy = Deputy(ranks, tmp_path, 0.0)
    deputy.hear(100.0)
    assert not deputy.replaces(1e6)
