"""Notes on stderr: rank 0 alone prints them, and only without --quiet."""

import sys

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
        print(line, file=sys.stderr, flush=True)
