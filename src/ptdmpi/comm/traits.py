"""The properties of a wire, its begin and its end."""

from typing import TYPE_CHECKING, ClassVar

import torch

if TYPE_CHECKING:  # the import initialises MPI
    from mpi4py import MPI


class WireError(RuntimeError):
    """An operation cannot be done any more; its words say which."""


class WireTraits:
    """The differences between wires, apart from how they move tensors.

    `exact`: sums are taken in ascending rank order, in float32 or wider, independently of messages
    and algorithm; code that needs equal bits checks this. `posts_early`: a receive may be begun
    long before its message without holding up what is begun after it. `overlaps`: operations make
    progress while this rank computes, so that it pays to begin them early.
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
        """Return the collective that this rank's device is in, as `busy` names it; empty if it is
        in none, or still computes earlier work. Never waits; any thread may call it."""
        return ""

    def failure(self) -> str:
        """Why nothing that was begun can be trusted any more; empty while all is well. Never
        waits; any thread may ask."""
        return ""

    def abort(self) -> None:
        """End what is under way on this rank, from any thread; no tensor can be sent any more. MPI
        ends its own messages."""
        return
