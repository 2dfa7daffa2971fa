"""Signals that arrive while a program starts: before its command can handle them.

A program spends its first tenths of a second, under load seconds, on imports. In this time Ctrl-C
would print a traceback of an import, and SIGTERM would end the process with the code of the signal.
This module is imported first, and imports only `signal`, `os` and `sys`.
"""

import os
import signal
import sys

# The requests to stop of a batch system or launcher. Commands that save and stop on request handle
# these signals later.
REQUESTS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
INTERRUPTED = 130


class EndOnInterrupt:
    """A handler of SIGINT for the time of imports: it prints one line and ends the process at once,
    because an exception inside an import may be changed into another."""

    def __init__(self, program: str) -> None:
        self._line = f"{program}: interrupted\n".encode()

    def __call__(self, number: int, frame: object) -> None:
        """Print the line and end the process with exit code 130."""
        try:
            os.write(2, self._line)
        finally:
            os._exit(INTERRUPTED)


def begin(program: str, holding: tuple[str, ...] = ()) -> None:
    """Prepare the process for signals during its start. SIGINT ends the process with one line.

    If the first argument of the command line is a command in `holding`, REQUESTS wait (they are
    blocked) until `release` is called; that command must call it when it has its own handlers.
    """
    # a shell's background jobs ignore SIGINT, and continue to do so
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, EndOnInterrupt(program))
    words = [word for word in sys.argv[1:] if not word.startswith("-")]
    if words and words[0] in holding:
        signal.pthread_sigmask(signal.SIG_BLOCK, REQUESTS)


def imported() -> None:
    """End the time of imports: SIGINT raises KeyboardInterrupt from now on."""
    if isinstance(signal.getsignal(signal.SIGINT), EndOnInterrupt):
        signal.signal(signal.SIGINT, signal.default_int_handler)


def release() -> None:
    """Deliver the signals that have waited since `begin`, and let later ones through."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, REQUESTS)


def end() -> None:
    """Prepare the process for signals during its exit, whose code is decided: SIGINT ends it
    without a traceback, and no request waits."""
    if callable(signal.getsignal(signal.SIGINT)):
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    release()
