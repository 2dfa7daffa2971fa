"""User-Level Failure Mitigation (ULFM): the functions of MPI that let the other ranks continue when
a rank is lost.

Open MPI 5 has ULFM (Bland et al. 2013, "Post-failure recovery of MPI communication capability";
MPI 5 proposal) if it is started with `--with-ft ulfm`. Different ranks may see the failure in
different operations, and with different error classes; only `agree` gives all survivors the same
answer.
"""

import contextlib
import os
import sys
import time
from collections.abc import Mapping

import numpy as np
from mpi4py import MPI

from ptdmpi.comm.world import Process, World
from ptdmpi.config import InputError

# Time limit in seconds for the launcher to report which rank died. Operations can fail before this
# report arrives; the measured delay was 41 ms (median), at most 53 ms.
PATIENCE_S = 5.0
ALL_FLAGS = (1 << 31) - 1


def require(environ: Mapping[str, str] = os.environ) -> None:
    """Raise InputError if the launcher would end the job after the loss of a rank.

    Calling a ULFM function would not show whether the launcher does this: Open MPI and MPICH accept
    such calls even under a launcher that ends the job. This function checks an environment variable
    instead, which `mpirun --with-ft ulfm` sets for its ranks.
    """
    if environ.get("OMPI_MCA_mpi_ft_enable", "0").lower() not in ("1", "true"):
        raise InputError(
            'run.on_failure = "shrink": this job ends when a rank is lost, because its launcher '
            "was started without fault tolerance; legal: mpirun --with-ft ulfm ... (Open MPI 5 or "
            'newer), or run.on_failure = "abort"'
        )


def rank_lost(world: World, patience_s: float = PATIENCE_S) -> bool:
    """Return True if an MPI operation has failed because a rank is lost: a communicator of `world`
    is then revoked, or MPI reports a failed rank in it.

    The error class of the operation does not reliably show a loss: a broken barrier can raise
    MPI_ERR_OTHER. The function waits up to `patience_s` seconds before it returns False, because
    MPI may report the loss late.
    """
    end = time.monotonic() + patience_s
    while not any(comm.Is_revoked() or comm.Get_failed().Get_size() for comm in world.made):
        if time.monotonic() > end:
            return False
        # MPI notices the loss only in a call that makes progress, and this call may raise an error
        with contextlib.suppress(MPI.Exception):
            world.control.Iprobe()
        time.sleep(0.005)
    return True


def revoke(world: World) -> None:
    """Revoke all communicators of this world, so that the MPI call of every rank that waits raises
    an error.

    Communicators without a lost rank must be revoked, too. In such a communicator, a rank may wait
    for another rank that has stopped its work because of the loss. The waiting rank continues only
    if this communicator is revoked.
    """
    for comm in world.made:
        comm.Revoke()


def agree(world: World, flags: int, poll_s: float = 0.0) -> int:
    """Return the bits of `flags` that all living ranks have set. All living ranks get the same
    number.

    Every living rank must call this function, which also works on a revoked communicator. If
    `poll_s` is not 0, the function sleeps that many seconds between two checks.
    """
    # MPIX_Comm_agree requires a C int, and combines the flags of the ranks by bitwise AND
    bits = np.array([flags], dtype=np.intc)
    request = world.control.Iagree(bits)
    # if ranks are lost, the call raises an error, but the bits are valid (ULFM, MPIX_Comm_agree)
    with contextlib.suppress(MPI.Exception):
        while poll_s and not request.Test():
            time.sleep(poll_s)
        request.Wait()
    return int(bits[0])


def shrink(world: World) -> tuple[World, list[Process]]:
    """Return the world of the living ranks, in their old order, and a list of the lost ranks. All
    living ranks call this function."""
    control = world.control.Shrink()
    ranks = range(control.Get_size())
    living = MPI.Group.Translate_ranks(control.Get_group(), ranks, world.control.Get_group())
    lost = [process for rank, process in enumerate(world.processes) if rank not in living]
    return World(control, [world.processes[rank] for rank in living], [control]), lost


def leave(world: World, code: int) -> None:
    """End this process without MPI_Finalize, which can hang after the loss of a rank. All living
    ranks call `leave`."""
    # if another rank is lost meanwhile, the barrier fails; then this rank ends without it
    with contextlib.suppress(MPI.Exception):
        world.control.Barrier()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
