"""The file that describes a measured cluster, for `ptdmpi plan --cluster FILE`."""

import os
from pathlib import Path
from typing import Any

from ptdmpi.base.disk import write_whole
from ptdmpi.config import InputError


def require_writable(path: Path) -> None:
    """Raise InputError if `path` cannot be written as a cluster file. Call this function before the
    measurement, so that no time is lost."""
    if path.suffix != ".toml" or not path.parent.is_dir() or path.is_dir():
        raise InputError(f"--output {path}: must be a .toml file in a directory that exists")
    if not os.access(path.parent, os.W_OK):
        raise InputError(f"--output {path}: {path.parent} cannot be written to")


def save(path: Path, tree: dict[str, Any], head: str) -> None:
    """Write the description `tree` of a cluster as TOML, after the comment `head`. If writing
    fails, no incomplete file remains.

    Raise InputError if the file cannot be written.
    """
    import tomlkit

    try:
        write_whole(path, head + tomlkit.dumps(tree))
    except OSError as error:
        raise InputError(f"--output {path}: {error.strerror}") from None
