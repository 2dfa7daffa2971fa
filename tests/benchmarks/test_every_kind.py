"""The kinds of runs that are killed: every name of the program's tables, each a legal run."""

import random
import subprocess
import sys

import pytest

from benchmarks.faults.deaths import IN_A_START, Death, KilledRun, append, count, runs_in, table
from benchmarks.faults.every_kind import trial
from benchmarks.faults.kinds import STEPS, every_kind, names_of, prepare_all, require_bases
from ptdmpi.config import load, resolve
from ptdmpi.config.adapt import AdaptMethod
from ptdmpi.config.choices import CodesName, ScheduleName
from ptdmpi.config.methods import CompressorName, MethodName
from ptdmpi.config.precision import PrecisionName

KINDS = every_kind()


@pytest.mark.parametrize("literal", [MethodName, ScheduleName, AdaptMethod, PrecisionName])
def test_every_name_is_there(literal):
    assert set(names_of(literal)) <= KINDS.keys()


def test_every_compressor_is_there():
    assert {f"compressed-{name}" for name in names_of(CompressorName)} <= KINDS.keys()


def test_every_format_of_quantized_weights_is_there():
    """Trained weights, and the frozen weights of a base with adapters."""
    for codes in names_of(CodesName):
        assert {f"quantized-{codes}", f"quantized-base-{codes}"} <= KINDS.keys()


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_is_legal(kind, tmp_path):
    prepare_all(tmp_path / "runs")
    way = KINDS[kind]
    assert resolve(load(tmp_path / "runs/config.toml", way.settings), way.ranks).run.steps == STEPS


@pytest.mark.long
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.startswith("quantized-base-")])
def test_the_base_of_a_kind_fits_its_settings(kind, tmp_path):
    prepare_all(tmp_path / "runs")
    way = KINDS[kind]
    require_bases(tmp_path / "runs", way)
    options = [word for setting in way.settings for word in ("--set", setting)]
    command = [sys.executable, "-m", "ptdmpi", "train", "config.toml", "--dry-run", "--ranks", "2"]
    ended = subprocess.run(
        [*command, *options], cwd=tmp_path / "runs", capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == 0, ended.stderr


def test_results_are_kept_and_counted(tmp_path):
    runs = [
        KilledRun("ring", True, (Death("one rank", 4.0), Death(IN_A_START, None))),
        KilledRun("zb-v", False, (Death("one rank", 6.0),), "exit code 1"),
    ]
    for run in runs:
        append(tmp_path / "results.jsonl", run)
    assert runs_in(tmp_path / "results.jsonl") == runs
    assert runs_in(tmp_path / "others.jsonl") == [] and count(runs) == 3
    rows = {line.split()[0]: line.split()[1:] for line in table(["ring", "zb-v"], runs).split("\n")}
    #  one rank, all ranks, in a start, launcher; all, runs, lost, median
    assert rows["ring"] == ["1", "0", "1", "0", "2", "1", "0", "4.0"]
    assert rows["zb-v"] == ["1", "0", "0", "0", "1", "1", "1", "6.0"]
    assert rows["all"] == ["2", "0", "1", "0", "3", "2", "1", "5.0"]


@pytest.mark.long
@pytest.mark.together
@pytest.mark.parametrize("kind", list(KINDS)[::4])
def test_a_killed_kind(kind, tmp_path):
    """`make torture` in short: one run of every fourth kind, which takes half a minute each."""
    prepare_all(tmp_path / "runs")
    run = trial(tmp_path / "runs", KINDS[kind], random.Random(kind), copies=True)
    assert run.deaths and not run.why, run.line()
