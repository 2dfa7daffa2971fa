"""Records for other tools: names, resumptions, failures.

The tools' own readers check the files if their extras are installed.
"""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from ptdmpi.config import InputError
from ptdmpi.sinks.contract import Past
from ptdmpi.sinks.record import scalars
from ptdmpi.sinks.sinks import Sinks, require
from ptdmpi.train.records.directory import RunDirectory
from tests._configs import small
from tests.sinks._events import curve

TRAINED = {"step": 7, "loss": 2.5, "mfu": 0.25, "layout": "t=1", "skipped": False}


def directory(path: Path, changes: dict[str, Any], step: int) -> RunDirectory:
    made = RunDirectory(path, "", step)
    made.open_sinks(small({"log." + key: value for key, value in changes.items()}))
    return made


def train(run: RunDirectory, first: int, last: int, loss: float) -> None:
    for step in range(first, last + 1):
        run.record(step=step, loss=loss + step, layout="t=1")
    run.close()


def test_a_record_becomes_named_numbers():
    wire = {"wire_bytes": {"data": {"all_reduce": 8}}, "wire_messages": {}}
    found = scalars({**TRAINED, **wire, "epochs": [0.5, 1.5], "slow_ranks": [{"rank": 1}]})
    assert found == {
        "train/loss": 2.5,
        "speed/mfu": 0.25,
        "train/skipped": 0.0,
        "data/epochs/0": 0.5,
        "data/epochs/1": 1.5,
    }
    found = scalars({"step": 3, "validation_losses": {"a/b": 1.0}, "bigram_validation_loss": 2.0})
    assert found == {
        "validation/validation_losses/a/b": 1.0,
        "validation/bigram_validation_loss": 2.0,
    }
    assert scalars({"step": 3, "checkpoint_bytes": 5}) == {"checkpoint/checkpoint_bytes": 5.0}


@pytest.mark.parametrize(
    ("key", "value", "package"),
    [("tensorboard", True, "tensorboardX"), ("wandb", "offline", ""), ("mlflow", True, "mlflow")],
)
def test_a_missing_package_is_one_line(monkeypatch, key, value, package):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    log = small({f"log.{key}": value}).log
    with pytest.raises(InputError) as error:
        require(log)
    assert f"log.{key} = " in str(error.value) and f"'ptdmpi[{key}]'" in str(error.value)
    assert package in str(error.value) and "\n" not in str(error.value)
    require(small().log)


def test_a_sink_that_fails_is_given_up_and_told_of_once(tmp_path, monkeypatch):
    class Failing:
        def __init__(self, config: object, past: Past) -> None:
            self.closed = False

        def record(self, values: dict[str, Any]) -> None:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr("ptdmpi.sinks.sinks._wanted", lambda log: [("tensorboard", Failing)])
    said: list[str] = []
    sinks = Sinks(small(), Past(tmp_path, 0, False), said.append)
    sinks.record(TRAINED)
    sinks.record(TRAINED)
    sinks.close()
    assert len(said) == 1 and "log.tensorboard is given up" in said[0] and "No space" in said[0]


def test_tensorboard_shows_what_metrics_has(tmp_path):
    """Start several times: first, resumed at the end, resumed earlier, begun anew."""
    pytest.importorskip("tensorboardX")
    folder = tmp_path / "tensorboard"

    def recorded() -> dict[int, float]:
        lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
        return {record["step"]: record["loss"] for record in map(json.loads, lines)}

    train(directory(tmp_path, {"tensorboard": True}, 0), 1, 4, 0.5)
    assert curve(folder) == recorded() == {1: 1.5, 2: 2.5, 3: 3.5, 4: 4.5}
    train(directory(tmp_path, {"tensorboard": True}, 4), 5, 8, 0.5)
    assert curve(folder) == recorded() and len(recorded()) == 8
    train(directory(tmp_path, {"tensorboard": True}, 3), 4, 6, 100.5)
    assert curve(folder) == recorded() and recorded()[4] == 104.5 and max(recorded()) == 6
    train(directory(tmp_path, {"tensorboard": True}, 0), 1, 2, 200.5)
    assert curve(folder) == recorded() == {1: 201.5, 2: 202.5}


def test_tensorboard_switched_on_later_has_the_steps_before(tmp_path):
    pytest.importorskip("tensorboardX")
    train(directory(tmp_path, {}, 0), 1, 3, 0.5)
    assert not (tmp_path / "tensorboard").exists()
    train(directory(tmp_path, {"tensorboard": True}, 2), 3, 4, 10.5)
    assert curve(tmp_path / "tensorboard") == {1: 1.5, 2: 2.5, 3: 13.5, 4: 14.5}


def test_tensorboard_has_on_disk_what_a_checkpoint_has_behind_it(tmp_path):
    """A killed process closes nothing, so records are flushed before."""
    pytest.importorskip("tensorboardX")
    run = directory(tmp_path, {"tensorboard": True}, 0)
    run.record(step=1, loss=1.0)
    run.record(step=1, checkpoint_bytes=100)
    assert curve(tmp_path / "tensorboard") == {1: 1.0}
    run.close()


def offline_runs(folder: Path) -> list[tuple[str, dict[int, float]]]:
    """Return the run's id and its loss by step for each offline directory of wandb, in order."""
    module = pytest.importorskip("wandb.proto.wandb_internal_pb2")
    found = []
    for path in sorted(
        folder.glob("offline-run-*/run-*.wandb"), key=lambda p: p.stat().st_mtime_ns
    ):
        identity, losses = "", {}
        for data in _journal(path.read_bytes()):
            record = module.Record.FromString(data)
            if record.HasField("run"):
                identity = record.run.run_id
            if record.HasField("history"):
                items = {i.key or "/".join(i.nested_key): i.value_json for i in record.history.item}
                losses[record.history.step.num] = json.loads(items["train/loss"])
        found.append((identity, losses))
    return found


def _journal(data: bytes) -> list[bytes]:
    """Yield the records of a file in LevelDB's log format, after 7 bytes of wandb's own.

    Each has a head of 7 bytes (checksum, length, kind), and is cut at blocks of 32 KiB.
    """
    place, records, part = 7, [], b""
    while place + 7 <= len(data):
        left = 32768 - place % 32768
        if left < 7:
            place += left
            continue
        length, kind = int.from_bytes(data[place + 4 : place + 6], "little"), data[place + 6]
        part = (part if kind in (3, 4) else b"") + data[place + 7 : place + 7 + length]
        if kind in (1, 4):
            records.append(part)
        place += 7 + length
    return records


@pytest.mark.long
def test_wandb_goes_on_with_the_same_run_and_branches_on_a_roll_back(tmp_path):
    pytest.importorskip("wandb")
    train(directory(tmp_path, {"wandb": True}, 0), 1, 3, 0.5)
    train(directory(tmp_path, {"wandb": "offline"}, 3), 4, 5, 0.5)
    train(directory(tmp_path, {"wandb": True}, 2), 3, 4, 10.5)
    (first, before), (second, after), (third, anew) = offline_runs(tmp_path / "wandb")
    assert first == second != third
    assert before == {1: 1.5, 2: 2.5, 3: 3.5} and after == {4: 4.5, 5: 5.5}
    assert anew == {1: 1.5, 2: 2.5, 3: 13.5, 4: 14.5}
