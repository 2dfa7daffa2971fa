"""A time limit for code that might wait for ever."""

import contextlib
import signal
from collections.abc import Iterator


@contextlib.contextmanager
def at_most(seconds: int) -> Iterator[None]:
    """Raise AssertionError if the block takes longer than `seconds` seconds."""

    def give_up(*_: object) -> None:
        raise AssertionError(f"not done after {seconds} s")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
