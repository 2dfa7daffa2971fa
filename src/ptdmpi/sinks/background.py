"""A sink that runs in a separate thread. It is used for tools that send records to a server, so
that a slow server does not delay the training.
"""

import queue
import threading
from collections.abc import Callable
from typing import Any

from ptdmpi.sinks.contract import Sink

MOST_WAITING = 10_000  # maximum number of records that wait for the server.
CLOSE_S = 10.0  # seconds within which the server must accept the last records of a run


class Background:
    """A sink that passes its records to another sink in a separate thread. Only this thread uses
    the other sink: the thread calls `make` to create the other sink, and calls all methods of the
    other sink.

    If the other sink raises an exception, the next call of this sink raises the same exception. The
    thread is a daemon thread, so a server that hangs does not keep the process alive.
    """

    def __init__(self, name: str, make: Callable[[], Sink]) -> None:
        self._make = make
        self._waiting = queue.Queue[dict[str, Any] | None](MOST_WAITING)
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def record(self, values: dict[str, Any]) -> None:
        """Queue one record. Raise an exception if the other sink has failed, or if too many records
        wait for the other sink."""
        if self._error is not None:
            raise self._error
        try:
            self._waiting.put_nowait(values)
        except queue.Full:
            raise TimeoutError(f"{MOST_WAITING} records wait for its server") from None

    def close(self) -> None:
        """Wait until the sink's thread has passed all records to the other sink and has closed the
        other sink. Raise an exception if this takes longer than CLOSE_S seconds, or if the other
        sink has failed."""
        try:
            self._waiting.put(None, timeout=CLOSE_S)
        except queue.Full:
            raise TimeoutError(f"{MOST_WAITING} records wait for its server") from None
        self._thread.join(CLOSE_S)
        if self._error is not None:
            raise self._error
        if self._thread.is_alive():
            raise TimeoutError(f"its server does not take the last records in {CLOSE_S:.0f} s")

    def _run(self) -> None:
        try:
            sink = self._make()
            while (values := self._waiting.get()) is not None:
                sink.record(values)
            sink.close()
        except Exception as error:  # the main thread reports the error
            self._error = error
