"""The properties of a wire, its beginning and its end."""

from typing import TYPE_CHECKING, ClassVar

import torch

if TYPE_CHECKING:  # the import initialises MPI
    from mpi4py import MPI


class WireError(RuntimeError):
    """An error: an operation cannot be done any more. The message names it."""


class WireTraits:
    """The differences between wires, apart from how they move tensors.

    `exact`: sums are taken in ascending rank order, in float32 or wider, independently of messages
    and algorithm. Code that needs equal bits checks this. `posts_early`: a receive may begin long
    before its message arrives, and does not delay later operations. `overlaps`: operations make
    progress while this rank computes, so that it is useful to begin them early.
    """

    exact: ClassVar[bool] = False
    posts_early: ClassVar[bool] = False
    overlaps: ClassVar[bool] = False

    @classmethod
    def open(cls, everyone: "MPI.Comm", device: torch.device) -> str:
        """Prepare the wire, on all ranks of a world, before its groups are connected; the ranks
        compute on `device`. Return a remark for the log. Raises SharedInputError on every rank if
        the wire cannot serve them."""
        return ""

    def pending(self) -> str:
        """Return the collective that this rank's device is in, by its name in `busy`; "" if it is
        in none, or still computes earlier work. It never waits; any thread may call it."""
        return ""

    def failure(self) -> str:
        """Return the error after which no operation that has begun can be trusted; "" if there is
        none. It never waits; any thread may call it."""
        return ""

    def abort(self) -> None:
        """End what is under way on this rank, from any thread; no tensor can be sent any more. MPI
        ends its own messages."""
        return
