"""The kinds of runs that are killed: every name of the program's tables, each a legal run."""

import random
import subprocess
import sys

import pytest

from benchmarks.faults import every_kind as benchmark
from benchmarks.faults.deaths import IN_A_START, Death, KilledRun, append, count, runs_in, table
from benchmarks.faults.every_kind import trial
from benchmarks.faults.kinds import (
    KEPT,
    LEFT_OUT,
    NEEDS,
    PREFIXES,
    STEPS,
    choices,
    every_kind,
    names_of,
    prepare_all,
    require_bases,
)
from ptdmpi.config import Config, load, resolve
from ptdmpi.config.choices import CodesName
from tests.train.test_every_feature import choices as features

KINDS = every_kind()


SETTINGS = {name: set(way.settings) for name, way in KINDS.items()}


@pytest.mark.parametrize("choice", list(choices()), ids=str)
def test_every_choice_of_the_configuration_is_a_kind(choice):
    """By its setting, or as the default value of its key, in a run with what the key needs."""
    key, value, default = choice
    if default:
        needs = {f"run.steps={STEPS}", *NEEDS.get(f"{key}={value}", NEEDS.get(key, ()))}
        assert needs in [words - {f"{key}={value}"} for words in SETTINGS.values()]
    else:
        word = str(value).lower() if isinstance(value, bool) else value
        assert [name for name, words in SETTINGS.items() if f"{key}={word}" in words]


def test_every_choice_of_the_tests_of_features_is_a_kind_or_is_left_out():
    """The tests of features and the torture read the configuration apart from one another."""
    numbers = {"parallel.zero", "optimizer.ema_decay", "adapt.rank"}
    known = {key for key, _, _ in choices()} | numbers
    for key, _ in features():
        section, _, _ = key.partition(".")
        assert key in known or {key, section} & LEFT_OUT.keys(), key


def test_what_is_left_out_exists():
    sections = Config.sections()
    for word in (*LEFT_OUT, *KEPT, *PREFIXES, *NEEDS):
        section, _, key = word.partition("=")[0].partition(".")
        assert not key or key in sections[section].model_fields, word
        assert section in sections, word


def test_names_of_several_tables_are_kinds():
    names = {"ring", "zb-v", "ia3", "fp8", "context-ulysses", "compressed-sign", "feedback-ef21"}
    names |= {"zero-3", "muon", "own", "dpo", "choice", "offload-disk", "gemma2", "ema", "expert"}
    assert names <= KINDS.keys()


def test_every_format_of_quantized_weights_is_there():
    """Trained weights, and the frozen weights of a base with adapters."""
    for codes in names_of(CodesName):
        assert {f"quantized-{codes}", f"quantized-base-{codes}"} <= KINDS.keys()


def test_all_kinds_are_legal(tmp_path):
    prepare_all(tmp_path / "runs")
    for kind, way in KINDS.items():
        tree = load(tmp_path / "runs/config.toml", way.settings)
        assert resolve(tree, way.ranks).run.steps == STEPS, kind


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


def test_a_lost_run_without_a_folder_is_counted(tmp_path, monkeypatch):
    """A job that ends before a rank has made the folder of the run is lost, and the next runs
    follow; what it has printed is kept."""

    class Job:
        def __init__(self, folder, *others):
            self.output = folder / "supervised.txt"
            self.output.write_text("no rank started")

        def wait(self):
            return 1

    monkeypatch.setattr(benchmark, "SupervisedRun", Job)
    monkeypatch.setattr(benchmark, "killed", lambda job, choice: [])
    (tmp_path / "reference-ring").mkdir()
    (tmp_path / "reference-ring/done").touch()
    run = trial(tmp_path, KINDS["ring"], random.Random(1), copies=True)
    assert run.why == "exit code 1"
    (kept,) = tmp_path.glob("lost-ring-*")
    assert (kept / "supervised.txt").read_text() == "no rank started"


@pytest.mark.long
@pytest.mark.together
@pytest.mark.parametrize("kind", list(KINDS)[::4])
def test_a_killed_kind(kind, tmp_path):
    """`make torture` in short: one run of every fourth kind, which takes half a minute each."""
    prepare_all(tmp_path / "runs")
    run = trial(tmp_path / "runs", KINDS[kind], random.Random(kind), copies=True)
    assert run.deaths and not run.why, run.line()
