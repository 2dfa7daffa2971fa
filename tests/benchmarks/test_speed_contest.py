"""The rounds of a row: further rounds where the spread is widest, and an end without waits."""

import math
import subprocess
from dataclasses import replace
from itertools import cycle
from unittest import mock

import pytest

from benchmarks.speed import bench, sides
from benchmarks.speed.bench import CLOSE, MORE, Contest, more_rounds
from benchmarks.speed.case import Row, Variant
from benchmarks.speed.rounds import LeastTimes
from benchmarks.speed.shown import best
from benchmarks.speed.sides import SideFailed, TimedSteps
from benchmarks.speed.trials import Rival
from tests.benchmarks.test_speed import QUIET, Round, _result

SINGLE, TWO = Row("single", "fp32"), Row("t=2", "fp32")


class FakeSide:
    """A trainer whose steps take the seconds in `times`, by row; ptdmpi's take 1 s."""

    times: dict

    def __init__(self, row, variant, end_s):
        self.row, self.variant = row, variant

    def __enter__(self):
        return self

    def __exit__(self, *error):
        return None

    def train(self, count):
        time_s = 1.0
        if self.variant is not None:
            time_s = next(self.times[self.row.layout])
        if not time_s:
            raise SideFailed("it has ended")
        return TimedSteps(time_s, [9.0] * count, 1, 0.0)

    def limits(self):
        return LeastTimes(0.5, 0.6)


@pytest.fixture
def fake(monkeypatch):
    monkeypatch.setattr(bench, "Side", FakeSide)
    return FakeSide


def contest(row, *tools):
    rivals = [Rival(tool, tool, row, Variant(tool)) for tool in tools]
    return Contest(row, rivals, math.inf)


def test_time_that_is_left_is_spent_on_the_widest_spread(fake, capsys):
    """Until the time is over, or no spread is wide."""
    fake.times = {"single": cycle([2.0, 2.2, 2.1]), "t=2": cycle([2.0, 2.04, 2.02])}
    both = contest(SINGLE, "torch"), contest(TWO, "torch")
    written = mock.Mock()
    for each in both:
        each.run(1, math.inf)
        assert each.spread == math.inf  # a single round shows no spread
        each.run(2, math.inf)
    with pytest.raises(KeyboardInterrupt):
        more_rounds(both, math.inf, mock.Mock(side_effect=KeyboardInterrupt))
    assert [len(each.done) for each in both] == [2 + MORE, 2]
    more_rounds(both, math.inf, written)
    assert all(each.spread <= CLOSE for each in both)
    rounds = [len(each.done) for each in both]
    assert rounds[0] > rounds[1]
    assert written.call_count + 1 == sum((count - 2) // MORE for count in rounds)
    assert capsys.readouterr().out.count("single-fp32, again") == (rounds[0] - 2) // MORE
    (result,) = both[0].results()
    assert result.counted == len(result.rounds) == rounds[0]
    fake.times = {"single": cycle([2.0, 4.0, 3.0])}
    both[0].run(rounds[0] + 9, math.inf)
    assert both[0].spread > CLOSE
    done = len(both[0].done)
    more_rounds(both, 0.0, written)  # no time
    assert len(both[0].done) == done


def test_a_removed_trainer_stays_out(fake):
    fake.times = {"single": iter([2.0, 2.0, 0.0])}
    row = contest(SINGLE, "torch")
    row.run(2, math.inf)
    assert row.results() == [] and row.spread == 0.0
    row.run(4, math.inf)
    assert row.sides.keys() == {bench.OURS} and len(row.out) == 1


def test_a_row_has_a_line_with_its_fastest_rival():
    ours = replace(_result([Round(3.0, 1.0, QUIET)]), tool="ptdmpi")
    slow = replace(_result([Round(3.0, 1.0, QUIET)]), scalar=False)
    fast = replace(_result([Round(3.0, 2.0, QUIET)] * 2), tool="megatron", scalar=False)
    (_, head, line) = best.lines([ours, slow, fast])
    assert head.startswith("ratio to the fastest other trainer")
    assert line.split() == ["t=2", "bf16", "1.500", "90%", "2", "megatron"]
    assert list(best.lines([ours, replace(fast, scalar=True)])) == []


def test_a_rank_without_a_launcher_is_killed_without_a_wait():
    with subprocess.Popen(["sleep", "60"]) as process:
        with mock.patch.object(process, "wait", side_effect=AssertionError):
            sides._kill(process)
        assert process.wait(10) < 0
