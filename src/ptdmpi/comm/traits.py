"""The properties of a transport, and the methods that open and abort it."""

from typing import TYPE_CHECKING, ClassVar

import torch

if TYPE_CHECKING:  # not imported at run time, because importing mpi4py.MPI initialises MPI
    from mpi4py import MPI


class WireError(RuntimeError):
    """An error that a transport raises when it has failed and cannot complete operations any more.
    The message names the operation."""


class WireTraits:
    """The base class of communicators, with the properties of a transport.

    If `exact` is True, the terms of a sum are added in ascending order of ranks, in float32 or a
    wider type, whatever the size of the message. Code that needs bitwise equal sums checks `exact`.
    If `posts_early` is True, a receive may begin long before its message arrives, without delaying
    later operations. If `overlaps` is True, operations make progress while this rank computes, so
    beginning an operation early saves time.
    """

    exact: ClassVar[bool] = False
    posts_early: ClassVar[bool] = False
    overlaps: ClassVar[bool] = False

    @classmethod
    def open(cls, everyone: "MPI.Comm", device: torch.device) -> str:
        """Prepare the transport on all ranks of a world, before the groups of the world are
        connected. The ranks compute on `device`. Return a remark for the log. Raises
        SharedInputError on every rank if the transport cannot be used."""
        return ""

    def pending(self) -> str:
        """Return the name of the collective that this rank's device is executing at the moment. The
        names are those of `Communicator.busy`. Return "" if the device executes no collective, or
        still computes earlier work. This method never waits, and any thread may call it."""
        return ""

    def failure(self) -> str:
        """Return the error that makes the results of operations invalid, or "" if there is no
        error. This method never waits, and any thread may call it."""
        return ""

    def abort(self) -> None:
        """End the operations of this rank that have begun. Afterwards no tensor can be sent through
        this transport. Any thread may call `abort`. For the `mpi` transport this method does
        nothing, because MPI ends its own messages."""
        return
