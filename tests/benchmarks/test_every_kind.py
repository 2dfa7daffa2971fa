"""The kinds of runs that are killed: every name of the program's tables, each a legal run."""

import random

import pytest

from benchmarks.faults.every_kind import Count, every_kind, names_of, prepare_all, table, trial
from ptdmpi.config import load, resolve
from ptdmpi.config.adapt import AdaptMethod
from ptdmpi.config.choices import ScheduleName
from ptdmpi.config.methods import CompressorName, MethodName

KINDS = every_kind()


@pytest.mark.parametrize("literal", [MethodName, ScheduleName, AdaptMethod])
def test_every_name_is_there(literal):
    assert set(names_of(literal)) <= KINDS.keys()


def test_every_compressor_is_there():
    assert {f"compressed-{name}" for name in names_of(CompressorName)} <= KINDS.keys()


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_is_legal(kind, tmp_path):
    prepare_all(tmp_path / "runs")
    way = KINDS[kind]
    assert resolve(load(tmp_path / "runs/config.toml", way.settings), way.ranks).run.steps == 40


@pytest.mark.long
@pytest.mark.together
@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_kind(kind, tmp_path):
    """`make torture` in short: one run of each kind."""
    prepare_all(tmp_path / "runs")
    count = Count()
    trial(tmp_path / "runs", KINDS[kind], random.Random(kind), count, copies=True)
    assert count.deaths and not count.lost, table({kind: count})
