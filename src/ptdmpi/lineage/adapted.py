"""Adapters and their frozen base model. This module defines the entries about adapters in the
manifest of a checkpoint, and the check whether a run may resume from a checkpoint of adapters."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ptdmpi.config import AdaptConfig, InputError, TaskConfig
from ptdmpi.config.section import OnResume

# The key under which the manifest of a checkpoint stores the section [adapt] of the run, including
# the path of the frozen base model.
KEY = "adapt"
# A key inside the entry `KEY` of the manifest. Its value is the section [task] of the run. The key
# is missing if the run had no task.
TASK = "task"
NO_TASK = TaskConfig()
# Keys of [adapt] that may change between two starts of a run.
FREE = {key for key in AdaptConfig.model_fields if AdaptConfig.on_resume(key) is not OnResume.BOUND}


@dataclass(frozen=True)
class Base:
    """The frozen base model: the path of its checkpoint, and a hash of the names, shapes and
    checksums of its weights, taken from its manifest."""

    path: str
    sha256: str


@dataclass(frozen=True)
class Adapted:
    """The adapters that the manifest of a checkpoint describes. `task` is the task whose head was
    trained together with the adapters, or NO_TASK."""

    adapt: AdaptConfig
    base: Base
    task: TaskConfig = NO_TASK

    def in_manifest(self) -> dict[str, Any]:
        """Return the entries that describe the adapters in the manifest of a checkpoint."""
        table = self.adapt.model_dump(mode="json", exclude={"base"})
        entry = {**table, "base": self.base.path, "base_sha256": self.base.sha256}
        if self.has_head:
            entry[TASK] = self.task.model_dump(mode="json")
        return {KEY: entry}

    @property
    def has_head(self) -> bool:
        """Return True if a head for a task was trained together with the adapters."""
        return self.task.kind != "none"

    def require(self, path: Path, base: Base) -> None:
        """Raise InputError unless these adapters, which are stored at `path`, were trained on the
        base model `base`."""
        if base.sha256 != self.base.sha256:
            raise InputError(
                f"checkpoint {path}: its adapters belong to the weights of {self.base.path} "
                f"(sha256 {self.base.sha256[:12]}), but {base.path} has other weights (sha256 "
                f"{base.sha256[:12]}); legal: the model on which they were trained"
            )


def adapted_of(path: Path, said: Mapping[str, Any]) -> Adapted | None:
    """Return the adapters that the manifest `said` of the checkpoint at `path` describes. Return
    None if the checkpoint contains a full model. Raises InputError for a damaged entry."""
    table = said.get(KEY)
    if table is None:
        return None
    try:
        given = dict(table)
        base = Base(str(given["base"]), str(given.pop("base_sha256")))
        task = TaskConfig.model_validate(given.pop(TASK, {}))
        return Adapted(AdaptConfig.model_validate(given), base, task)
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"checkpoint {path}: {KEY} is not understood: {error}") from None


def require_kind(path: Path, said: Mapping[str, Any], whole: bool = True) -> None:
    """Raise InputError if the checkpoint at `path` is of the wrong kind. If `whole` is True, it
    must contain a full model; if `whole` is False, it must contain only adapters. `said` is the
    content of the checkpoint's manifest."""
    adapted = adapted_of(path, said)
    if adapted is None and not whole:
        raise InputError(
            f"checkpoint {path} contains a full model, and not adapters; legal: its path as "
            "adapt.base"
        )
    if adapted is not None and whole:
        raise InputError(
            f"checkpoint {path} contains only adapters, for the model {adapted.base.path}; legal: "
            "that model with --adapter, or the merged model that `ptdmpi adapter merge` writes"
        )


def judge_adapted(path: Path, said: Mapping[str, Any], adapt: AdaptConfig, base: Base) -> None:
    """Raise InputError unless a run that trains these adapters on `base` may resume from the
    checkpoint at `path`."""
    require_kind(path, said, whole=False)
    adapted = adapted_of(path, said)
    assert adapted is not None
    before = adapted.adapt.model_dump(exclude=FREE)
    now = adapt.model_dump(exclude=FREE)
    for key, value in before.items():
        if now[key] != value:
            raise InputError(
                f"checkpoint {path}: its adapters have adapt.{key} = {value}, this run has "
                f"{now[key]}; legal: the value in the checkpoint"
            )
    adapted.require(path, base)
