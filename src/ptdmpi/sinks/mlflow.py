"""The sink for MLflow. It writes to the server whose address is in the environment variable
MLFLOW_TRACKING_URI. If the variable is not set, the sink writes files in `runs/NAME/mlflow/`.

This sink needs only the client of MLflow (the package mlflow-skinny). If a run of ptdmpi resumes at
its last recorded step, the sink continues the same MLflow run. If the run resumes at an earlier
step, the sink begins another MLflow run, and writes all earlier records to the new MLflow run,
because MLflow cannot remove single steps.
"""

import os
import re
import time
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from ptdmpi.config import Config
from ptdmpi.sinks.continued import keep_id, known_id
from ptdmpi.sinks.contract import Past
from ptdmpi.sinks.record import kept_records, scalars

FOLDER = "mlflow"
# maximum numbers of parameters and of metrics that MLflow accepts in one request
MOST_PARAMETERS, MOST_METRICS = 100, 1000
MOST_CHARACTERS = 6000  # maximum number of characters in the value of a parameter


class MlFlow:
    """A sink that writes to a run of MLflow."""

    def __init__(self, config: Config, past: Past) -> None:
        # without this variable, the MLflow client sends usage data to its authors
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        folder = past.path / FOLDER
        folder.mkdir(exist_ok=True)
        address = os.environ.get("MLFLOW_TRACKING_URI")
        if not address:
            # MLflow 3 refuses its own file format without this variable
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
            address = (folder / "store").resolve().as_uri()
        from mlflow.tracking import MlflowClient

        self._client = MlflowClient(tracking_uri=address)
        known = None if past.dropped else known_id(folder)
        self._run = known or self._begun(config)
        keep_id(folder, self._run)
        if known is None:
            for record in kept_records(past.path / "metrics.jsonl"):
                self.record(record)
        else:
            self._client.update_run(self._run, status="RUNNING")

    def _begun(self, config: Config) -> str:
        """Begin a run of MLflow, with the configuration as its parameters. Return the id of this
        run."""
        from mlflow.entities import Param

        name = config.log.mlflow_experiment
        experiment = self._client.get_experiment_by_name(name)
        identity = (
            self._client.create_experiment(name) if experiment is None else experiment.experiment_id
        )
        run: str = self._client.create_run(identity, run_name=config.run.name).info.run_id
        parameters = (
            Param(key, value[:MOST_CHARACTERS])
            for key, value in _parameters(config.model_dump(mode="json"))
        )
        while some := list(islice(parameters, MOST_PARAMETERS)):
            self._client.log_batch(run, params=some)
        return run

    def record(self, values: dict[str, Any]) -> None:
        """Pass one record to MLflow, with the step of the record."""
        from mlflow.entities import Metric

        now_ms = time.time_ns() // 10**6
        metrics = (
            Metric(_legal(name), number, now_ms, values["step"])
            for name, number in scalars(values).items()
        )
        while some := list(islice(metrics, MOST_METRICS)):
            self._client.log_batch(self._run, metrics=some)

    def close(self) -> None:
        """Mark the run of MLflow as finished."""
        self._client.set_terminated(self._run)


def _parameters(tree: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the full name of each key of a configuration, such as "run.steps", and its value as
    text."""
    for section, keys in tree.items():
        for key, value in keys.items():
            yield f"{section}.{key}", str(value)


def _legal(name: str) -> str:
    """Return `name` as a name of a metric that MLflow accepts. Illegal characters and illegal parts
    of a path are replaced by "_"."""
    parts = re.sub(r"[^\w./ -]", "_", name).split("/")
    return "/".join("_" if part in ("", ".", "..") else part for part in parts)
