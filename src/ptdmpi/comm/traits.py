"""The properties of a transport (`wire`), and how it is opened and aborted."""

from typing import TYPE_CHECKING, ClassVar

import torch

if TYPE_CHECKING:  # importing mpi4py.MPI initialises MPI
    from mpi4py import MPI


class WireError(RuntimeError):
    """An error of a transport: operations on it cannot be completed any more. The message names the
    operation."""


class WireTraits:
    """The properties in which transports differ, apart from how they send tensors.

    `exact`: sums are computed in ascending rank order, in float32 or wider, whatever the size of
    the message. Code that needs equal bits checks this. If `posts_early` is True, a receive may
    begin long before its message arrives, without delaying later operations. If `overlaps` is True,
    operations make progress while this rank computes, so it is useful to begin them early.
    """

    exact: ClassVar[bool] = False
    posts_early: ClassVar[bool] = False
    overlaps: ClassVar[bool] = False

    @classmethod
    def open(cls, everyone: "MPI.Comm", device: torch.device) -> str:
        """Prepare the transport on all ranks of a world, before its groups are connected. The ranks
        compute on `device`. Return a remark for the log. Raises SharedInputError on every rank if
        the transport cannot be used."""
        return ""

    def pending(self) -> str:
        """Return the collective that this rank's device is in, by its name in `busy`; "" if it is
        in none, or still computes earlier work. The call never waits, and any thread may make
        it."""
        return ""

    def failure(self) -> str:
        """Return the error after which the results of operations that have begun are invalid; "" if
        there is none. The call never waits, and any thread may make it."""
        return ""

    def abort(self) -> None:
        """End the operations of this rank that have begun; no tensor can be sent any more. Any
        thread may call `abort`. The `mpi` transport does nothing here, because MPI ends its own
        messages."""
        return
