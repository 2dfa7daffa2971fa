"""Weights & Biases: `runs/NAME/wandb/`, offline unless `log.wandb = "online"`.

A run there has an id and steps that only rise. So a start that goes on where the last one ended
takes the same id: the same curves go on. A start from an earlier step takes a new id in the same
group and writes the kept records again: there, nothing can be taken back.
"""

import json
import secrets
from typing import Any

import wandb

from ptdmpi.base.disk import write_whole
from ptdmpi.config import Config
from ptdmpi.sinks.record import kept_records, scalars
from ptdmpi.sinks.sinks import Past

STATE = "run.json"  # which id the run has


class WeightsAndBiases:
    """One process of a run, as wandb sees it."""

    def __init__(self, config: Config, past: Past) -> None:
        folder = past.path / "wandb"
        folder.mkdir(exist_ok=True)
        known = None if past.dropped else _known_id(folder / STATE)
        identity = known or secrets.token_hex(4)
        write_whole(folder / STATE, json.dumps({"id": identity}))
        # it would ask git for the sources, and repeat every line of the terminal in its files
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
        # an asynchronous save is recorded late, under its own step
        self._step = max(self._step, values["step"])
        self._run.log(scalars(values), step=self._step)

    def close(self) -> None:
        self._run.finish()


def _known_id(state: Any) -> str | None:
    try:
        found = json.loads(state.read_bytes())["id"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return found if isinstance(found, str) else None
