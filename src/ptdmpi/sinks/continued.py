"""The id that another tool, such as wandb, gave to a run. The id is stored in the run directory, so
that a resumed run continues the same run in that tool."""

import json
from pathlib import Path

from ptdmpi.base.disk import read_file, write_whole

STATE = "run.json"  # name of the file that contains the id


def known_id(folder: Path) -> str | None:
    """Return the id that is stored in `folder`, or None if the file with the id is missing or
    damaged."""
    try:
        identity = json.loads(read_file(folder / STATE))["id"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return identity if isinstance(identity, str) else None


def keep_id(folder: Path, identity: str) -> None:
    """Store the id of the other tool's run in `folder`."""
    write_whole(folder / STATE, json.dumps({"id": identity}))
