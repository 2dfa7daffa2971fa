"""Functions that print lines on stdout and stderr. Notes and warnings are lines on stderr that only
rank 0 prints; notes are printed only without --quiet.
"""

import os
import sys
from typing import TextIO

import click

from ptdmpi.base.launched import launched_rank
from ptdmpi.base.words import printable_line

# keys in the `meta` dictionary of click's context.
QUIET = "ptdmpi.quiet"  # the setting --quiet.
WARNED = "ptdmpi.warned"  # the set of warnings that the command has printed


def quiet() -> bool:
    """Return True if the running command was called with --quiet."""
    context = click.get_current_context(silent=True)
    return context is not None and bool(context.meta.get(QUIET))


def note(line: str) -> None:
    """Print a note on stderr: a line that is not a result of the command."""
    if not (quiet() or launched_rank()):
        put(line, sys.stderr)


def warn(line: str) -> None:
    """Print a warning on stderr, also with --quiet. A command prints the same warning only once.
    Control characters are escaped, because a warning may contain the name of a file."""
    context = click.get_current_context(silent=True)
    printed = set() if context is None else context.meta.setdefault(WARNED, set())
    if line not in printed and not launched_rank():
        printed.add(line)
        put(f"warning: {printable_line(line)}", sys.stderr)


def put(line: str, stream: TextIO) -> None:
    """Print a line on stdout or stderr. If the stream is a file on a full or broken disk, discard
    the line, because a lost line must not end a run. Raises BrokenPipeError if the program that
    reads the stream has ended."""
    try:
        print(line, file=stream, flush=True)
    except BrokenPipeError:
        raise
    except OSError:
        # The line is still in the stream's buffer. Flush the buffer to /dev/null: otherwise Python
        # would try to write the line at exit, and report an error.
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
