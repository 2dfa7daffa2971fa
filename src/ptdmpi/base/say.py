"""Lines on the output, and notes on stderr: rank 0 alone prints notes, and only without --quiet."""

import os
import sys
from typing import TextIO

import click

from ptdmpi.base.launched import launched_rank

QUIET = "ptdmpi.quiet"  # in the `meta` of the command's context


def quiet() -> bool:
    """Return True if the running command was called with --quiet."""
    context = click.get_current_context(silent=True)
    return context is not None and bool(context.meta.get(QUIET))


def note(line: str) -> None:
    """Print a line that is no result."""
    if not (quiet() or launched_rank()):
        put(line, sys.stderr)


def put(line: str, stream: TextIO) -> None:
    """Print a line on stdout or stderr. Drop the line if the stream is a file on a full or broken
    disk, because a run does not end for this reason. Raises BrokenPipeError."""
    try:
        print(line, file=stream, flush=True)
    except BrokenPipeError:
        raise
    except OSError:
        # the line is still in the stream's buffer; if it stays there, the end of Python fails
        kept = os.dup(stream.fileno())
        send_nowhere(stream)
        stream.flush()
        os.dup2(kept, stream.fileno())
        os.close(kept)


def send_nowhere(stream: TextIO) -> None:
    """Discard all further output on stdout or stderr."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
