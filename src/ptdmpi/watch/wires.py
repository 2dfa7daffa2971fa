"""The state of one rank's transports, which the heartbeat reports: the collective that the rank
executes, and failures.
"""

from ptdmpi.comm.world import Axes

# time limit for the main thread to leave its wait after its transports were aborted
PATIENCE_S = 5.0


class Wires:
    """The communicators of one rank, which the heartbeat's thread queries. All methods of this
    class return immediately, without waiting.

    This class is needed because the main thread cannot query the communicators while it waits for
    its device, which it does once in each step.
    """

    def __init__(self, axes: Axes) -> None:
        self.axes = axes
        self.failed = ""  # The failure after which the transports were aborted.
        self.deaf = False  # True if only the host is queried, because the device has failed.
        self._ended_s = 0.0

    def inside(self) -> tuple[str, str]:
        """Return the axis and the name of the collective that this rank is in.

        If the host of the rank waits in a collective, return this collective; otherwise return the
        collective that the device of the rank executes. Both returned texts are empty outside a
        collective.
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
        main thread does not raise an error in time.

        After the abort, the main thread leaves its wait and raises an error. If the main thread has
        not raised an error PATIENCE_S seconds after the abort, return the failure; otherwise return
        an empty text.
        """
        if not (self.failed or self.deaf) and (failure := self.axes.failure()):
            self.failed = failure
            self._ended_s = now_s
            self.axes.abort()
        if self.failed and now_s > self._ended_s + PATIENCE_S:
            return self.failed
        return ""
