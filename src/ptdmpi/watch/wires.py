"""What the wires of one rank tell its heartbeat: the collective it is in, and what has failed."""

from ptdmpi.comm.world import Axes

PATIENCE_S = 5.0  # for the main thread to come out of its wait, once its wires are ended


class Wires:
    """The groups of one rank, asked from beside the thread that trains; it waits for nothing.

    The main thread may sit for long in the one wait of a step for its device, and asks nothing
    meanwhile.
    """

    def __init__(self, axes: Axes) -> None:
        self.axes = axes
        self.failed = ""  # what was found, at the time when its wires were ended
        self.deaf = False  # whether devices are no longer asked
        self._ended_s = 0.0

    def inside(self) -> tuple[str, str]:
        """The axis and the name of the collective that this rank is in; empty if in none: that of
        its host, or else that of its device."""
        for name, group in self.axes.groups.items():
            if busy := group.busy:  # read once: the other thread may leave it meanwhile
                return self.axes.grid.called(name), busy
        for name, group in self.axes.groups.items():
            if not self.deaf and (pending := group.pending()):
                return self.axes.grid.called(name), pending
        return "", ""

    def stuck(self, now_s: float) -> str:
        """End all wires of this rank once one has failed: whoever waits for its device comes out
        of that, and raises. Returns what has failed if that has had its time."""
        if not (self.failed or self.deaf) and (failure := self.axes.failure()):
            self.failed, self._ended_s = failure, now_s
            self.axes.abort()
        return self.failed if self.failed and now_s > self._ended_s + PATIENCE_S else ""
