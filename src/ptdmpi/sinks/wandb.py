"""The sink for Weights & Biases (wandb). The sink writes files in `runs/NAME/wandb/`, and sends
them to the server only if `log.wandb` is "online".

A run of wandb has an id, and the step numbers of its records must increase. If a run of ptdmpi
resumes at its last recorded step, the sink continues the wandb run with the same id, so the curves
continue. If the run resumes at an earlier step, the sink begins a wandb run with a new id in the
same group, and writes all earlier records to the new wandb run, because wandb cannot remove
recorded steps.
"""

import secrets
from typing import Any

import wandb

from ptdmpi.config import Config
from ptdmpi.sinks.continued import keep_id, known_id
from ptdmpi.sinks.contract import Past
from ptdmpi.sinks.record import kept_records, scalars


class WeightsAndBiases:
    """A sink that writes to a run of wandb."""

    def __init__(self, config: Config, past: Past) -> None:
        folder = past.path / "wandb"
        folder.mkdir(exist_ok=True)
        known = None if past.dropped else known_id(folder)
        identity = known or secrets.token_hex(4)
        keep_id(folder, identity)
        # do not record the git commit, and do not record what this process prints
        quiet = wandb.Settings(silent=True, console="off", disable_git=True, save_code=False)
        self._step = 0
        self._run = wandb.init(
            project=config.log.wandb_project,
            name=config.run.name,
            group=config.run.name,
            id=identity,
            resume="allow",
            dir=str(past.path),
            config=config.model_dump(mode="json"),
            mode="online" if config.log.wandb == "online" else "offline",
            settings=quiet,
        )
        if known is None:
            for record in kept_records(past.path / "metrics.jsonl"):
                self.record(record)

    def record(self, values: dict[str, Any]) -> None:
        """Pass one record to wandb, with the step of the record."""
        # The record of an asynchronous save is written after the records of later steps, but has
        # the number of the step that was saved. But wandb refuses a step that is smaller than the
        # last step that it has received, so pass that step instead.
        self._step = max(self._step, values["step"])
        self._run.log(scalars(values), step=self._step)

    def close(self) -> None:
        """Finish the run of wandb."""
        self._run.finish()
