"""Small messages between ranks during training; sending and receiving never block."""

from collections import deque
from typing import Any

from mpi4py import MPI


class Mailbox:
    """A mailbox that sends picklable values between ranks, on a separate communicator.

    All ranks make their mailboxes together, because a new mailbox duplicates the communicator
    `control`, and this duplication is a collective call. After that, only one thread of each rank
    uses the mailbox. If other threads call MPI at the same time, MPI must provide
    MPI_THREAD_MULTIPLE.
    Messages between two ranks arrive in order. The communicator is never freed, because all ranks
    would have to free it together, and a rank may be lost by then.
    """

    def __init__(self, control: MPI.Comm) -> None:
        self.control = control.Dup()
        self.rank: int = control.Get_rank()
        self.size: int = control.Get_size()
        self._leaving: list[MPI.Request] = []
        self._own: deque[tuple[int, Any]] = deque()

    @staticmethod
    def works_in_a_thread() -> bool:
        """Return True if MPI may be called from several threads."""
        return MPI.Query_thread() == MPI.THREAD_MULTIPLE

    def send(self, value: Any, rank: int) -> None:
        """Send `value` to `rank`, and return immediately."""
        if rank == self.rank:
            self._own.append((rank, value))
            return
        # keep the bytes of a message unchanged until its request is done (MPI 4.1, section 3.7.2)
        self._leaving = [request for request in self._leaving if not request.Test()]
        self._leaving.append(self.control.isend(value, rank))

    def receive(self) -> list[tuple[int, Any]]:
        """Return (sender, value) for all messages that have arrived. Raises MPI.Exception if a rank
        was lost."""
        arrived = list(self._own)
        self._own.clear()
        status = MPI.Status()
        while self.size > 1:
            # improbe reserves the message that it finds, so that `recv` receives exactly this
            # message (MPI 4.1, section 3.8.2)
            message = self.control.improbe(status=status)
            if message is None:
                break
            arrived.append((status.Get_source(), message.recv()))
        return arrived

    def abort(self, code: int) -> None:
        """End every rank of the job with exit code `code`."""
        self.control.Abort(code)
