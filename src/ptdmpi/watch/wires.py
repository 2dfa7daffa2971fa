"""The wires of one rank for its heartbeat: the collective that it is in, and failures."""

from ptdmpi.comm.world import Axes

PATIENCE_S = 5.0  # limit for the main thread to leave its wait after its wires were ended


class Wires:
    """The groups of one rank, for questions of the heartbeat's thread; no method waits.

    The main thread cannot ask them while it waits for its device, as it does once in a step.
    """

    def __init__(self, axes: Axes) -> None:
        self.axes = axes
        self.failed = ""  # the failure because of which the wires were ended
        self.deaf = False  # True if only the host is asked
        self._ended_s = 0.0

    def inside(self) -> tuple[str, str]:
        """Return the axis and the name of the collective that this rank is in.

        It is the one that its host waits in, else the one that its device has not finished. Both
        texts are empty outside of a collective.
        """
        for name, group in self.axes.groups.items():
            if busy := group.busy:  # read once: the main thread may change it
                return self.axes.grid.called(name), busy
        for name, group in self.axes.groups.items():
            if not self.deaf and (pending := group.pending()):
                return self.axes.grid.called(name), pending
        return "", ""

    def stuck(self, now_s: float) -> str:
        """End all wires of this rank once one has failed; return a failure that nobody raised.

        The end of the wires lets the main thread leave its wait and raise. Return the failure if it
        has not after PATIENCE_S, else an empty text.
        """
        if not (self.failed or self.deaf) and (failure := self.axes.failure()):
            self.failed = failure
            self._ended_s = now_s
            self.axes.abort()
        if self.failed and now_s > self._ended_s + PATIENCE_S:
            return self.failed
        return ""
