"""The attempts of a run, and the configuration with which each step was trained. Both are read from
the run's history."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ptdmpi.base.words import counted
from ptdmpi.config import Config, InputError, resolve
from ptdmpi.lineage.attempts import PastAttempt, attempts, that_trained


class TrainedSteps(NamedTuple):
    """An attempt of a run, with the first and the last recorded step that it trained."""

    attempt: PastAttempt
    first: int
    last: int

    def trained(self, step: int) -> bool:
        """Return True if this attempt trained `step`, according to the recorded steps."""
        return self.attempt.first < step <= max(self.last, self.first)


def trained_steps(path: Path, steps: Sequence[Mapping[str, Any]]) -> list[TrainedSteps]:
    """Return the attempts of the run in the directory `path`, oldest first. `steps` are the records
    of its steps.

    The list is empty if an older version, which wrote no history, trained the run. Raise InputError
    if the history cannot be read.
    """
    numbers = [record["step"] for record in steps]
    try:
        return [TrainedSteps(*trained) for trained in that_trained(attempts(path), numbers)]
    except OSError as error:
        raise InputError(f"{error.filename}: {error.strerror}") from None


def config_at(
    history: Sequence[TrainedSteps], step: int | None, otherwise: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the configuration with which `step` was trained. If `step` is None, return the
    configuration of the newest attempt.

    Return `otherwise` if the history does not contain the step.
    """
    configs = [part.attempt.config for part in history if step is None or part.trained(step)]
    return dict(configs[-1]) if configs else dict(otherwise)


def resolved(config: dict[str, Any]) -> Config:
    """Return the `Config` object of a recorded configuration. The result has as many ranks as the
    layout of the configuration, and no spare ranks.

    Raise InputError if this version does not accept the configuration.
    """
    parallel = config["parallel"]
    run = {**config["run"], "spare_ranks": 0, "on_failure": "abort"}
    ranks = parallel["tensor"] * parallel.get("context", 1) * parallel["pipeline"]
    ranks *= parallel["data"]
    return resolve({**config, "run": run}, ranks)


def paths(history: Sequence[TrainedSteps], config: Mapping[str, Any]) -> list[str]:
    """Return the paths of the training datasets, in the order of `samples_drawn` in the records."""
    if not history:
        return [source["path"] for source in config["data"]["train"]]
    newest = history[-1].attempt.trained_on["stretches"][-1]
    sources = [*newest["sources"], *newest["gone"]]
    return [source["path"] for source in sorted(sources, key=lambda source: source["key"])]


def as_json(history: Sequence[TrainedSteps]) -> list[dict[str, Any]]:
    """Return one dict for each attempt in `history`, for the output of --json."""
    return [
        {
            "attempt": attempt.number,
            "first_step": first,
            "last_step": last,
            "how": attempt.how,
            "layout": attempt.layout,
            "ranks": attempt.ranks,
            "changed": list(attempt.changed),
            "began": attempt.began,
            "ended": attempt.ended or None,
            "why": attempt.why or "no end is recorded: killed, or still training",
        }
        for attempt, first, last in history
    ]


def rows(entries: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Return the rows of the report's table that describe the attempts of a run. The list is empty
    if the run had only one attempt and no setting was changed."""
    if len(entries) == 1 and not entries[0]["changed"]:
        return []
    table = []
    for entry in entries:
        first = entry["first_step"]
        ranks = counted(entry["ranks"], "rank")
        text = f"{entry['layout']}, {ranks}, {entry['why']}"
        table.append((f"steps {first} to {entry['last_step']}", text))
        table += [(f"  changed at step {first}", change) for change in entry["changed"]]
    return table
