"""The exceptions for mistakes that the user can correct."""

import sys
from types import TracebackType

from ptdmpi.base.words import printable


class InputError(Exception):
    """An error in the user's input. The message is one line, which gives the mistake, its location,
    and the legal values. The exit code of the program is 2.
    """


class SharedInputError(InputError):
    """An error in the user's input that all ranks of a job raise together, so only one rank needs
    to print the message."""


def end_in_one_line() -> None:
    """Set up a user's program so that an InputError that it does not catch ends it with one line
    and exit code 2, as after `end_together` of `ptdmpi.comm.world`, but without MPI. Do nothing in
    an interactive session, and if the program has another excepthook, such as that of
    `end_together`."""
    if sys.excepthook is sys.__excepthook__ and not hasattr(sys, "ps1"):
        sys.excepthook = _end


def _end(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print an InputError as one line, and raise SystemExit (2). Other exceptions are printed by
    Python, as usual."""
    if not isinstance(error, InputError):
        sys.__excepthook__(kind, error, trace)
        return
    print(printable(f"ptdmpi: error: {error}"), file=sys.stderr, flush=True)
    raise SystemExit(2)
