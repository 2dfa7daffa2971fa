"""The benchmark's trials of ways, and its waiting for sides that are slow or have ended."""

import socket
import subprocess
import sys
import tempfile
import time
from typing import ClassVar

import pytest

from benchmarks.speed.case import GptSizes, Row, Variant, choices
from benchmarks.speed.sides import Side, SideFailed, SideTooSlow, TimedSteps, TimeIsOver
from benchmarks.speed.trials import Trials

TINY = GptSizes(
    layers=4, hidden=32, heads=2, seq_length=16, vocab_size=64, global_size=8, micro_size=1
)


def test_fp32_has_one_way_and_no_trial_but_for_dtensor():
    assert choices(Row("d=2", "fp32"), "torch") == []
    assert Trials().fastest(Row("d=2", "fp32"), "torch") == (Variant("torch"), {})
    assert len(choices(Row("t=2", "bf16"), "torch")) == 3
    assert choices(Row("d=2,zero=3", "bf16"), "torch")[0] == [{"cast": "policy"}]
    assert choices(Row("d=2,zero=3", "fp32"), "deepspeed") == []


class FakeSide:
    """A side of known speeds; autocast for each microbatch never ends."""

    speeds: ClassVar = {"fp32": 1.0, "step": 2.0, "masters": 3.0}
    started: ClassVar[list[Variant]] = []

    def __init__(self, row, variant, end_s):
        assert row.config.microbatches == 2
        self.variant, self.limit_s = variant, None
        self.started.append(variant)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        return None

    def train(self, count, limit_s=600.0):
        if self.variant.cast == "microbatch":
            raise SideTooSlow(f"more than {limit_s} s")
        speed = self.speeds[self.variant.cast] + self.variant.sequence_parallel
        speed -= 0.5 * self.variant.loss_parallel
        return TimedSteps(1.0 / speed, [9.0], 1, 0.0)


def test_the_fastest_way_is_found_decision_by_decision(monkeypatch):
    monkeypatch.setattr("benchmarks.speed.trials.Side", FakeSide)
    monkeypatch.setattr(FakeSide, "started", [])
    trials = Trials()
    best, tried = trials.fastest(Row("t=2", "bf16"), "torch", 1.0)
    assert best == Variant("torch", "masters", loss_parallel=False, sequence_parallel=True)
    # three casts, then one more for each of the other two decisions
    assert len(tried) == 5
    given_up = [name for name, trial in tried.items() if not trial.finished]
    assert given_up == ["bf16 autocast, loss parallel"]
    assert tried[best.name].tokens_per_s == max(trial.tokens_per_s for trial in tried.values())
    assert trials.fastest(Row("single", "bf16"), "torch", 1.0)[0] == Variant("torch", "masters")
    # what was hopeless once is not tried in another row
    assert [way.cast for way in FakeSide.started].count("microbatch") == 1


def test_where_no_way_is_left_there_is_still_a_bound(monkeypatch):
    class Hopeless(FakeSide):
        def train(self, count, limit_s=600.0):
            raise SideTooSlow(f"more than {limit_s} s")

    monkeypatch.setattr("benchmarks.speed.trials.Side", Hopeless)
    trials = Trials()
    for _ in range(2):  # also in a row after it
        best, tried = trials.fastest(Row("single", "bf16"), "torch", 1000.0)
        assert best is None
        assert tried and not any(trial.finished for trial in tried.values())


def test_a_slow_way_of_dividing_does_not_condemn_its_cast(monkeypatch):
    class SlowWithoutLossParallel(FakeSide):
        def train(self, count, limit_s=600.0):
            if not self.variant.loss_parallel:
                raise SideTooSlow(f"more than {limit_s} s")
            return super().train(count, limit_s)

    monkeypatch.setattr("benchmarks.speed.trials.Side", SlowWithoutLossParallel)
    trials = Trials()
    assert trials.fastest(Row("t=2", "fp32"), "torch")[0].loss_parallel
    assert trials.hopeless == set()


def test_without_time_for_trials_a_way_is_taken_untried(monkeypatch):
    monkeypatch.setattr("benchmarks.speed.trials.Side", FakeSide)
    monkeypatch.setattr(FakeSide, "started", [])
    trials = Trials()
    trials.until_s = time.monotonic()
    best, tried = trials.fastest(Row("t=2", "bf16"), "torch", 1.0)
    assert best == Variant("torch", "microbatch", loss_parallel=True)
    assert (tried, FakeSide.started, trials.untried) == ({}, [], 7)


def test_who_has_ended_is_not_waited_for():
    """The other rank may wait for it forever."""
    side = Side(Row("d=2", "fp32", TINY), Variant())
    here, there = socket.socketpair()
    with here, there, tempfile.TemporaryFile("w+") as side.log:
        side.streams[here.makefile("rw")] = here
        side.processes.append(subprocess.Popen([sys.executable, "-c", "print('so it goes')"]))
        with pytest.raises(SideFailed, match="ended while another was waited for"):
            side.train(1)


def test_nobody_is_waited_for_when_the_time_is_over():
    side = Side(Row("d=2", "fp32", TINY), Variant(), end_s=time.monotonic())
    here, there = socket.socketpair()
    with here, there, tempfile.TemporaryFile("w+") as side.log:
        side.streams[here.makefile("rw")] = here
        with pytest.raises(TimeIsOver):
            side.train(1)
