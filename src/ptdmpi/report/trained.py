"""What a run was trained with, step by step: by its own history, not by what was asked for last."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ptdmpi.base.words import counted
from ptdmpi.config import Config, InputError, resolve
from ptdmpi.lineage.attempts import PastAttempt, attempts, that_trained

Owed = tuple[
    PastAttempt, int, int
]  # an attempt, the first and the last recorded step that it trained


def owed(path: Path, steps: Sequence[Mapping[str, Any]]) -> list[Owed]:
    """The attempts that trained the recorded `steps`, oldest first; none where an older version
    wrote the run. Raises InputError."""
    try:
        return that_trained(attempts(path), [record["step"] for record in steps])
    except OSError as error:
        raise InputError(f"{error.filename}: {error.strerror}") from None


def config_at(
    found: Sequence[Owed], step: int | None, otherwise: Mapping[str, Any]
) -> dict[str, Any]:
    """The configuration that trained `step` (the last one: None); `otherwise` where no history
    knows."""
    mine = [
        one for one, first, last in found if step is None or one.first < step <= max(last, first)
    ]
    return dict(mine[-1].config if mine else otherwise)


def resolved(config: dict[str, Any]) -> Config:
    """A run's configuration, checked again for as many ranks as its layout has. Raises InputError
    where this version does not take it."""
    parallel = config["parallel"]
    run = {**config["run"], "spare_ranks": 0, "on_failure": "abort"}
    ranks = parallel["tensor"] * parallel["pipeline"] * parallel["data"]
    return resolve({**config, "run": run}, ranks)


def paths(found: Sequence[Owed], config: Mapping[str, Any]) -> list[str]:
    """The training datasets in the order of a record's `samples_drawn`."""
    if not found:
        return [one["path"] for one in config["data"]["train"]]
    last = found[-1][0].trained_on["stretches"][-1]
    return [one["path"] for one in sorted((*last["sources"], *last["gone"]), key=_key)]


def _key(source: Mapping[str, Any]) -> int:
    return source["key"]


def as_json(found: Sequence[Owed]) -> list[dict[str, Any]]:
    """One object for each attempt that trained a recorded step."""
    return [
        {
            "attempt": one.number,
            "first_step": first,
            "last_step": last,
            "how": one.how,
            "layout": one.layout,
            "ranks": one.ranks,
            "changed": list(one.changed),
            "began": one.began,
            "ended": one.ended or None,
            "why": one.why or "no end was written: killed, or still training",
        }
        for one, first, last in found
    ]


def rows(entries: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Lines of the report's table, where a run had more than one attempt or changed."""
    if len(entries) == 1 and not entries[0]["changed"]:
        return []
    found = []
    for one in entries:
        name = f"steps {one['first_step']} to {one['last_step']}"
        found.append((name, f"{one['layout']}, {counted(one['ranks'], 'rank')}, {one['why']}"))
        found += [(f"  changed at step {one['first_step']}", text) for text in one["changed"]]
    return found
