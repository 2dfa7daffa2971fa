"""Messages about the events of a run (it begins, stops, fails, ends, ...). The messages are sent to
the receivers that `log.notify` names: web addresses of chat channels, and mail addresses.

A message never delays or ends the training: each receiver has a separate thread, and each delivery
has a time limit. Web addresses and passwords are secrets, so they are read only from environment
variables, and no log line contains them.
"""

import atexit
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ptdmpi.config import InputError, LogConfig, RunConfig

BY_VARIABLE, BY_MAIL = "env:", "mailto:"
SERVER = "PTDMPI_SMTP"  # environment variable with the address of the mail server.
CLOSE_S = 5.0  # seconds that the process waits at its end for the delivery of messages


@dataclass(frozen=True)
class Notice:
    """A message about one event of a run. `steps` is the planned number of steps of the run. `step`
    is the last recorded step, and `loss` is the loss of this step, or None if no step is recorded.
    `why` is the reason for the event or a further description. `host` is the host that sends the
    message.
    """

    run: str
    event: str
    step: int
    steps: int
    loss: float | None
    why: str
    host: str

    @property
    def text(self) -> str:
        """Return the message as one line."""
        loss = "" if self.loss is None else f", loss {self.loss:.4f}"
        why = f": {self.why}" if self.why else ""
        return f"{self.run}: {self.event} at step {self.step} of {self.steps}{loss}{why}"

    def as_json(self) -> dict[str, Any]:
        """Return all fields of the message as a dict for JSON. The dict also has the key `text`,
        which chat tools show."""
        return {"text": self.text, **asdict(self)}


class Notices:
    """The receivers of messages about one run. `say` is a function that prints and logs a line."""

    def __init__(
        self,
        log: LogConfig,
        run: RunConfig,
        say: Callable[[str], None],
        environ: Mapping[str, str] = os.environ,
    ) -> None:
        self.run = run
        self._receivers = []
        for name in log.notify:
            deliver = _delivery(name, environ)
            if deliver is not None:
                self._receivers.append(_Receiver(name, deliver, say))
        if self._receivers:
            atexit.register(self.close)

    def send(self, event: str, step: int, loss: float | None = None, why: str = "") -> None:
        """Send a message about `event` to all receivers. This method does not wait for the
        delivery. The other arguments are fields of `Notice`."""
        if not self._receivers:
            return
        host = socket.gethostname()
        message = Notice(
            run=self.run.name,
            event=event,
            step=step,
            steps=self.run.steps,
            loss=loss,
            why=why,
            host=host,
        )
        for receiver in self._receivers:
            receiver.send(message)

    def close(self, limit_s: float = CLOSE_S) -> None:
        """Wait until all messages are delivered, but at most `limit_s` seconds. Later calls of
        `send` have no effect."""
        atexit.unregister(self.close)
        end_s = time.monotonic() + limit_s
        receivers, self._receivers = self._receivers, []
        for receiver in receivers:
            receiver.end()
        for receiver in receivers:
            receiver.join(max(0.0, end_s - time.monotonic()))


class _Receiver(threading.Thread):
    """The thread that delivers messages to one receiver, in the order in which they were sent. Only
    the first failure is reported, by a warning. The thread is a daemon thread, so a server that
    hangs does not keep the process alive."""

    def __init__(
        self, name: str, deliver: Callable[[Notice], None], say: Callable[[str], None]
    ) -> None:
        super().__init__(name=f"messages to {name}", daemon=True)
        self._receiver = name
        self._deliver = deliver
        self._say = say
        self._waiting = queue.SimpleQueue[Notice | None]()
        self.start()

    def send(self, message: Notice) -> None:
        self._waiting.put(message)

    def end(self) -> None:
        self._waiting.put(None)

    def run(self) -> None:
        warned = False
        while (message := self._waiting.get()) is not None:
            try:
                self._deliver(message)
            except Exception as error:  # no error of a server may disturb the training
                if not warned:
                    self._say(f"warning: log.notify: {self._receiver}: {_reason(error)}")
                warned = True


def require_receivers(log: LogConfig, environ: Mapping[str, str] = os.environ) -> None:
    """Raise InputError if an environment variable that `log.notify` names does not contain a web
    address. The error message does not contain the value of the variable."""
    for name in log.notify:
        variable = name.removeprefix(BY_VARIABLE)
        if variable == name:
            continue
        if variable not in environ:
            raise InputError(
                f"log.notify: the environment variable {variable} is not set; legal: export "
                f"{variable}=https://..., or leave {name} out"
            )
        if not environ[variable].startswith(("http://", "https://")):
            raise InputError(
                f"log.notify: the value of the environment variable {variable} is not a web "
                "address; legal: http://... or https://..."
            )


def _delivery(name: str, environ: Mapping[str, str]) -> Callable[[Notice], None] | None:
    """Return the function that delivers a message to the receiver `name`. Return None if this
    process does not know the receiver's address."""
    # imported only here, because these modules load slowly, and most runs send no messages
    from ptdmpi.sinks import delivery

    if name.startswith(BY_MAIL):
        address, server = name.removeprefix(BY_MAIL), environ.get(SERVER, "")
        return lambda message: delivery.mail(address, server, message.text, message.as_json())
    web = environ.get(name.removeprefix(BY_VARIABLE))
    if web is None:
        return None
    return lambda message: delivery.post(web, message.as_json())


def _reason(error: Exception) -> str:
    """Return the reason why a delivery failed. The text of the exception is not used, because it
    could contain the web address or the password."""
    code = getattr(error, "code", None) or getattr(error, "smtp_code", None)
    if code is not None:
        return f"the server answers with code {code}"
    cause = getattr(error, "reason", error)
    if isinstance(cause, OSError) and cause.strerror:
        return cause.strerror
    return type(cause if isinstance(cause, Exception) else error).__name__
