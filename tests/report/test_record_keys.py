"""The report shows every key that a run records, or the key's declaration says why it does not."""

import ast
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from click.testing import CliRunner

import ptdmpi
from ptdmpi import report
from ptdmpi.commands.report import command
from ptdmpi.config.model import MOST_MODULES
from ptdmpi.engine.loads import ExpertLoads
from ptdmpi.engine.noise import GradientNoise
from ptdmpi.engine.result import StepResult
from ptdmpi.model.output.losses import (
    COUNT,
    DISTILLATION,
    LOSS_KINDS,
    RIGHT,
    SummedLoss,
    ahead_name,
)
from ptdmpi.train.live import Completed
from ptdmpi.train.records.directory import RunDirectory
from ptdmpi.train.records.journal import Journal
from ptdmpi.train.records.keys import RECORD_KEYS, RecordKey
from ptdmpi.train.records.rates import Rates
from ptdmpi.train.validation import validation_record
from tests._configs import small
from tests._runs import records
from tests.report._made import made, record

LOSSES = {name: SummedLoss(2.0, 4) for name in LOSS_KINDS}
# A step of a run of every kind at once.
STEP = StepResult(
    loss=4.0,
    grad_norm=1.5,
    learning_rate=1e-3,
    loss_scale=1.0,
    skipped=True,
    overflow=False,
    compute_s=0.1,
    losses=LOSSES,
    consensus=0.25,
    bits_per_element=8.125,
    noise=GradientNoise(1.0, 2.0, 3.0),
    loads=ExpertLoads(torch.tensor([[3, 1, 0, 0], [1, 1, 1, 1]])),
)


def _of_step(folder: Path) -> set[str]:
    """Return the keys of a step's record."""
    config = small({"run.steps": 3})
    journal = Journal(config, SimpleNamespace(world=SimpleNamespace(rank=0)), lambda line: None)
    journal.directory = RunDirectory(folder, "", 0, lambda line: None)
    journal.rates = Rates(config, 50, 1, 1e12)
    journal.step(Completed(1, STEP, 0.5), 0.5)
    return set(records(folder)[0])


def _of_validations() -> set[str]:
    """Return the keys of validations of every kind of model. A validation uses neither a teacher
    nor modules for multi-token prediction."""
    unused = {DISTILLATION, *map(ahead_name, range(MOST_MODULES))}
    judged = {name: loss for name, loss in LOSSES.items() if name not in unused}
    tokens = {name: loss for name, loss in judged.items() if name not in (RIGHT, COUNT)}
    kinds = (judged, tokens)
    return {key for losses in kinds for key in validation_record("ab", [losses, losses])[0]}


def _written_in(path: Path) -> set[str]:
    """Return the keys that the calls of `keep` and `record` and the dicts that they extend name.

    These are keywords of the calls, and keys of `values` in the same file.
    """
    keys: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        match node:
            case ast.Call(func=ast.Attribute(attr="keep" | "record"), keywords=words):
                keys |= {word.arg for word in words if word.arg}
            case ast.Assign(
                targets=[ast.Subscript(value=ast.Name("values"), slice=ast.Constant(value=key))]
            ):
                keys.add(key)
            case ast.Assign(targets=[ast.Name("values")], value=ast.Dict(keys=names)):
                keys |= {name.value for name in names if isinstance(name, ast.Constant)}
    return keys


def _written(folder: Path) -> set[str]:
    """Return the keys that runs of any kind write."""
    training = Path(ptdmpi.__file__).parent / "train"
    named = set().union(*map(_written_in, training.rglob("*.py")))
    drawn = {"samples_drawn", "epochs"}  # `Course.drawn`
    return named | drawn | _of_step(folder) | _of_validations()


def test_every_key_that_a_run_writes_is_declared_and_no_other(tmp_path):
    assert _written(tmp_path) == set(RECORD_KEYS)


def _rows(path: Path) -> dict[str, str]:
    return dict(report.rows_of(report.summary(report.read(path))))


def test_every_key_with_a_row_is_in_the_table(tmp_path):
    step = record(1, 4.0, fullest_expert=[0.25, 0.5], dead_experts=[1, 2])
    others = [key for key, declared in RECORD_KEYS.items() if declared.rows and key not in step]
    rows = _rows(made(tmp_path / "run", 2, step, {"step": 1, **dict.fromkeys(others, 2.0)}))
    for key, declared in RECORD_KEYS.items():
        for row in declared.rows:
            assert (row.label or row.name.replace("_", " ")) in rows, key


def test_values_are_shown_with_their_units(tmp_path):
    more = {
        "skipped": True,
        "fullest_expert": [0.25, 0.5],
        "dead_experts": [1, 2],
        "consensus_distance": 0.25,
    }
    saved = {"step": 2, "checkpoint_bytes": 3_000_000, "checkpoint_write_s": 0.5}
    rows = _rows(made(tmp_path / "run", 2, record(1, 4.0, **more), record(2, 3.0), saved))
    assert rows["skipped steps"] == "1" and rows["distance between replicas"] == "0.2500"
    assert rows["fullest expert"] == "50.0%" and rows["dead experts"] == "3"
    assert rows["checkpoint"] == "3.0 MB" and rows["median save, written"] == "0.500 s"
    assert rows["median step"] == "2.000 s" and rows["median mfu"] == "25.0% of dense peak"


def test_a_key_of_another_version_is_shown_by_its_name(tmp_path):
    path = made(tmp_path / "run", 2, record(1, 4.0, temperature=3), record(2, 3.0, temperature=5))
    assert _rows(path)["newest temperature"] == "5"
    numbers = json.loads(CliRunner().invoke(command, [str(path), "--json"]).stdout)
    assert numbers["undeclared"] == {"temperature": 5}


def test_a_key_is_declared_in_one_way():
    for ways in ({}, {"within": "wire", "hidden": "because"}):
        with pytest.raises(TypeError, match=f"declares {len(ways)} ways"):
            RecordKey(**ways)
