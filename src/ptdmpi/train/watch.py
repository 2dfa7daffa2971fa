"""Requests to stop: a batch system's warning before the time limit, or a preemption."""

import signal
from types import FrameType

# EX_TEMPFAIL: stopped on request after saving; the same command again goes on
STOPPED_EXIT_CODE = 75


class StopRequest:
    """Remembers that SIGUSR1 or SIGTERM came to this rank.

    The handler only takes a note. All ranks vote at the end of the step, so they stop at the same
    one.
    """

    def __init__(self) -> None:
        self.received = False
        for number in (signal.SIGUSR1, signal.SIGTERM):
            signal.signal(number, self._receive)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.received = True
