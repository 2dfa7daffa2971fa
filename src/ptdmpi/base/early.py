"""Handling of signals that arrive while a program starts, before its command can handle them.

A program first imports its modules, which takes some tenths of a second, or several seconds on a
busy machine. Without this module, Ctrl-C would print a traceback during this time, and SIGTERM
would end the process with the exit code of the signal. A program imports this module before all
other modules. The module itself imports only `signal`, `os` and `sys`, because a signal that
arrives during these imports is not handled.

A program may also start without standard input, output or error (`ptdmpi train C >&-`). `begin`
opens /dev/null in place of a missing stream.
"""

import os
import signal
import sys

# The signals by which a batch system or a launcher requests that a program stops. Commands that
# save a checkpoint and stop on request install handlers for these signals later.
REQUESTS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
INTERRUPTED = 130


class EndOnInterrupt:
    """The handler of SIGINT during imports. It prints one line and ends the process at once. It
    does not raise KeyboardInterrupt, because a module that is being imported may catch
    KeyboardInterrupt and raise another exception."""

    def __init__(self, program: str) -> None:
        self._line = f"{program}: interrupted\n".encode()

    def __call__(self, number: int, frame: object) -> None:
        """Print that the program was interrupted, and end the process with exit code 130."""
        try:
            os.write(2, self._line)
        finally:
            os._exit(INTERRUPTED)


def begin(program: str, holding: tuple[str, ...] = ()) -> None:
    """Prepare the process for signals during its start: SIGINT prints one line and ends the
    process. Also replace missing standard streams by /dev/null.

    If the first argument that is not an option is a command in `holding`, the signals in REQUESTS
    are blocked until `release` is called. A command in `holding` must call `release` after it has
    installed its own handlers.
    """
    _open_missing_streams()
    # A shell starts background jobs with SIGINT ignored. Install no handler in such a job, so that
    # it still ignores SIGINT.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, EndOnInterrupt(program))
    words = [word for word in sys.argv[1:] if not word.startswith("-")]
    if words and words[0] in holding:
        signal.pthread_sigmask(signal.SIG_BLOCK, REQUESTS)


def _open_missing_streams() -> None:
    """Open /dev/null in place of each standard stream that the process was started without.

    If a stream stayed missing, the next file that the process opens, such as a checkpoint, would
    get the number of this stream. Libraries written in C would then print their messages into the
    file.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            # the smallest free number, which is the number of the missing stream
            number = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(number, True)  # child processes inherit the stream
            setattr(sys, name, os.fdopen(number, mode))


def imported() -> None:
    """Declare that the imports are done. From now on SIGINT raises KeyboardInterrupt, as in any
    Python program."""
    if isinstance(signal.getsignal(signal.SIGINT), EndOnInterrupt):
        signal.signal(signal.SIGINT, signal.default_int_handler)


def release() -> None:
    """Unblock the signals in REQUESTS. Signals that arrived since `begin` are delivered now."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, REQUESTS)


def end() -> None:
    """Prepare the process for signals during its exit: SIGINT ends it without a traceback, and no
    signal is blocked any longer."""
    if callable(signal.getsignal(signal.SIGINT)):
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    release()
