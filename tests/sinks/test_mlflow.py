"""MLflow: its files, resumed and rolled back, and a server that is too slow."""

import importlib.util
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from ptdmpi.sinks import background
from ptdmpi.sinks.background import Background
from ptdmpi.sinks.contract import Past
from ptdmpi.sinks.sinks import Sinks
from tests._configs import small
from tests.sinks.test_sinks import directory, train

has_mlflow = importlib.util.find_spec("mlflow") is not None


def losses(folder: Path) -> list[dict[int, float]]:
    """Return the loss by step of each run in MLflow's files, in the order of their begin."""
    from mlflow.tracking import MlflowClient

    client = MlflowClient((folder / "mlflow" / "store").resolve().as_uri())
    experiment = client.get_experiment_by_name("ptdmpi")
    runs = client.search_runs([experiment.experiment_id], order_by=["attributes.start_time"])
    assert all(run.data.params["model.hidden"] == "32" for run in runs)
    return [
        {item.step: item.value for item in client.get_metric_history(run.info.run_id, "train/loss")}
        for run in runs
    ]


@pytest.mark.long
@pytest.mark.skipif(not has_mlflow, reason="the extra mlflow is not installed")
def test_mlflow_goes_on_with_the_same_run_and_branches_on_a_roll_back(tmp_path, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    train(directory(tmp_path, {"mlflow": True}, 0), 1, 3, 0.5)
    train(directory(tmp_path, {"mlflow": True}, 3), 4, 5, 0.5)
    train(directory(tmp_path, {"mlflow": True}, 2), 3, 4, 10.5)
    before, anew = losses(tmp_path)
    assert before == {1: 1.5, 2: 2.5, 3: 3.5, 4: 4.5, 5: 5.5}
    assert anew == {1: 1.5, 2: 2.5, 3: 13.5, 4: 14.5}


class Slow:
    """A sink whose server takes `seconds` for each record."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.taken: list[int] = []
        self.thread = threading.current_thread()

    def record(self, values: dict[str, Any]) -> None:
        time.sleep(self.seconds)
        self.taken.append(values["step"])

    def close(self) -> None:
        self.taken.append(-1)


def test_a_slow_server_delays_no_record_and_gets_all():
    made: list[Slow] = []
    sink = Background("slow", lambda: made.append(Slow(0.02)) or made[0])
    begin = time.monotonic()
    for step in range(5):
        sink.record({"step": step})
    assert time.monotonic() - begin < 0.05
    sink.close()
    assert made[0].taken == [0, 1, 2, 3, 4, -1] and made[0].thread is not threading.main_thread()


def test_a_server_that_hangs_is_given_up_and_its_password_is_not_told(monkeypatch, tmp_path):
    monkeypatch.setattr(background, "CLOSE_S", 0.05)

    def fails() -> Slow:
        raise OSError("http://me:secret@host/api cannot be reached")

    wanted = [
        ("hangs", lambda config, past: Background("hangs", lambda: Slow(5.0))),
        ("mlflow", lambda config, past: Background("mlflow", fails)),
    ]
    monkeypatch.setattr("ptdmpi.sinks.sinks._wanted", lambda log: wanted)
    said: list[str] = []
    sinks = Sinks(small(), Past(tmp_path, 0, False), said.append)
    sinks.record({"step": 1})
    sinks.close()
    assert sorted(line.partition(" is given up: ")[0] for line in said) == [
        "warning: log.hangs",
        "warning: log.mlflow",
    ]
    assert "http://host/api" in "".join(said) and "secret" not in "".join(said)
