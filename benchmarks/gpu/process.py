"""Functions that run a part of the GPU measurement in a separate process, and read the JSON that
the process prints, or the reason for its failure."""

import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any

from benchmarks.launch import start

EVERY_S = 10.0  # seconds between two readings of a program's output
LEAST_S = 1.0


def answer(
    command: Sequence[str],
    limit_s: float,
    extra: Mapping[str, str] | None = None,
    so_far: Callable[[dict[str, Any]], None] = lambda printed: None,
) -> dict[str, Any]:
    """Run a program. Return the JSON object in the last complete line that the program prints to
    standard output.

    If the program fails, the object has the key "failed". If the program does not end within
    `limit_s` seconds, it is killed, and the object has the key "left". The values of both keys
    quote the last line of the program's standard error. `extra` is added to the program's
    environment. About every ten seconds `so_far` is called with the last object that the program
    has printed.
    """
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        process = start(command, output, extra=extra, errors=errors)
        ended = _wait(process, max(LEAST_S, limit_s), lambda: so_far(_last_object(_text(output))))
        printed = _last_object(_text(output))
        words = last_words(_text(errors))
    if not ended and not printed:
        ended = {"failed": "it printed nothing"}
    if words:
        ended = {word: f"{how}: {words}" for word, how in ended.items()}
    return printed | ended


def _wait(
    process: "subprocess.Popen[str]", limit_s: float, look: Callable[[], None]
) -> dict[str, str]:
    """Wait for a program, and kill its session after `limit_s` seconds. While the program runs,
    call `look` every EVERY_S seconds. Return a description of the failure if the program failed."""
    end_s = time.monotonic() + limit_s
    while (left_s := end_s - time.monotonic()) > 0.0:
        try:
            code = process.wait(timeout=min(EVERY_S, left_s))
        except subprocess.TimeoutExpired:
            look()
            continue
        return {"failed": f"exit code {code}"} if code else {}
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    return {"left": f"not over after {limit_s:.0f} s"}


def _text(file: IO[str]) -> str:
    """Return the text that a program has written to a file. The file position, which the program
    and this process share, stays unchanged."""
    size = os.fstat(file.fileno()).st_size
    return os.pread(file.fileno(), size, 0).decode("utf-8", errors="replace")


def _last_object(text: str) -> dict[str, Any]:
    for line in reversed(text.splitlines()):
        try:
            parsed = json.loads(line)
        except ValueError:  # the line is truncated, or a library has printed it
            continue
        if isinstance(parsed, dict):
            return parsed
    return {}


def last_words(errors: str) -> str:
    """Return the last line of standard error that does not belong to mpirun's own message, which is
    framed by dashes. Return "" if there is no such line."""
    lines = []
    framed = False
    for line in map(str.strip, errors.splitlines()):
        if len(line) > 20 and not line.strip("-"):
            framed = not framed
        elif line and not framed:
            lines.append(line)
    return lines[-1] if lines else ""
