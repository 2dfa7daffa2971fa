"""A part of the measurement as a process of its own, or as a program of several ranks: what it has
said when it ended, or when its time was over, and why it said no more."""

import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.launch import start


def answer(
    command: Sequence[str], limit_s: float, extra: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """The JSON of the last whole line that a program prints. "failed" in it, or "left" where its
    time was over, says how it ended, by the last words of its standard error.

    `extra` is added to the environment.
    """
    with tempfile.TemporaryFile("w+") as errors:
        process = start(command, subprocess.PIPE, extra=extra, errors=errors)
        try:
            text, _ = process.communicate(timeout=max(1.0, limit_s))
            ended = {} if process.returncode == 0 else {"failed": f"exit code {process.returncode}"}
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            text, _ = process.communicate()
            ended = {"left": f"not over after {limit_s:.0f} s"}
        errors.seek(0)
        said = last_words(errors.read())
    found = _last(text)
    if not ended and not found:
        ended = {"failed": "it printed nothing"}
    return found | {word: f"{how}: {said}" if said else how for word, how in ended.items()}


def _last(text: str) -> dict[str, Any]:
    for line in reversed(text.splitlines()):
        try:
            found = json.loads(line)
        except ValueError:  # a line that was cut short, or a library's
            continue
        if isinstance(found, dict):
            return found
    return {}


def last_words(errors: str) -> str:
    """The last line of standard error that is not mpirun's, which frames its own by dashes."""
    lines, framed = [], False
    for line in map(str.strip, errors.splitlines()):
        if len(line) > 20 and not line.strip("-"):
            framed = not framed
        elif line and not framed:
            lines.append(line)
    return lines[-1] if lines else ""
