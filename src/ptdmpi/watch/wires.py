"""The state of one rank's transports, which the heartbeat reports: the collective that the rank is
in, and failures.
"""

from ptdmpi.comm.world import Axes

# after the transports of a rank were aborted, its main thread must stop waiting within this number
# of seconds
PATIENCE_S = 5.0


class Wires:
    """The communicators of one rank, which the heartbeat's thread queries. All methods of this
    class return immediately, without waiting.

    The heartbeat thread queries the communicators, because the main thread waits for its device
    once in each step, and can query nothing while it waits.
    """

    def __init__(self, axes: Axes) -> None:
        self.axes = axes
        self.failed = ""  # the failure after which the transports were aborted.
        self.deaf = False  # True if the device has failed, so only the host is queried
        self._ended_s = 0.0

    def inside(self) -> tuple[str, str]:
        """Return the axis and the name of the collective that this rank is in.

        If the host waits in a collective, return this collective; otherwise return the collective
        that the device executes. If the rank is in no collective, both returned texts are empty.
        """
        for name, group in self.axes.groups.items():
            if busy := group.busy:  # read `busy` only once, because the main thread may change it
                return self.axes.grid.called(name), busy
        for name, group in self.axes.groups.items():
            if not self.deaf and (pending := group.pending()):
                return self.axes.grid.called(name), pending
        return "", ""

    def stuck(self, now_s: float) -> str:
        """Abort all transports of this rank if one of them has failed. Return the failure if the
        main thread does not react.

        After the abort, the main thread should stop waiting and raise an error. If this method is
        still called PATIENCE_S seconds after the abort, the main thread has not reacted, and the
        method returns the failure. Before that time, it returns an empty text.
        """
        if not (self.failed or self.deaf) and (failure := self.axes.failure()):
            self.failed = failure
            self._ended_s = now_s
            self.axes.abort()
        if self.failed and now_s > self._ended_s + PATIENCE_S:
            return self.failed
        return ""
