"""The environment of a rank, which must be right before mpi4py, torch or h5py is imported.

Sites differ in binding and network variables; those are left alone. Set here (only where the user
did not) is what is wrong on every machine otherwise.
"""

import contextlib
import gc
import os
import sys
from collections.abc import Iterator, Mapping, MutableMapping

from ptdmpi.base.words import counted
from ptdmpi.config import InputError
from ptdmpi.terminal import launched
from ptdmpi.terminal.say import note

# Each launcher's word for "this many ranks were started".
SIZE_VARIABLES = (*launched.SIZE_VARIABLES, "SLURM_NTASKS")


def begin(what: str) -> None:
    """Say at once what starts, before the seconds in which MPI and PyTorch are loaded, and set the
    environment. Call before importing mpi4py, torch or h5py."""
    ranks = counted(launched.launched_size(), "rank")
    note(f"ptdmpi {what}: {ranks}, loading MPI and PyTorch")
    prepare()


def prepare(environ: MutableMapping[str, str] = os.environ) -> None:
    """Set the defaults that every rank needs. Call before importing mpi4py, torch or h5py.

    Raises InputError where the current directory has been removed.
    """
    try:
        os.getcwd()
    except OSError as error:  # Open MPI and MKL would end the process, with words of their own
        raise InputError(
            f"the current directory is gone ({error.strerror}); cd to one that exists"
        ) from None
    if "HOME" not in environ:  # as cron, systemd and some containers do; Open MPI ends without it
        home = os.path.expanduser("~")  # from the table of users
        environ["HOME"] = home if os.path.isabs(home) else "/"
    # Lustre and GPFS often refuse the locks HDF5 asks for; shards are read-only.
    environ.setdefault("HDF5_USE_FILE_LOCKING", "FALSE")
    # GPU-aware MPI next to NCCL can deadlock on Cray; GPU buffers are never handed to MPI here.
    environ.setdefault("MPICH_GPU_SUPPORT_ENABLED", "0")
    _prepare_for_gpus(environ)
    local_ranks = int(environ.get("OMPI_COMM_WORLD_LOCAL_SIZE", "1"))
    if local_ranks > len(os.sched_getaffinity(0)):
        # A spinning rank keeps the core from the rank it waits for: 4 ms a message otherwise.
        environ.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")


@contextlib.contextmanager
def loading() -> Iterator[None]:
    """Suspend the garbage collector while modules are imported, and exclude their objects from
    later collections. They stay anyway, and scanning them again and again took a tenth of PyTorch's
    import."""
    collects = gc.isenabled()
    known = len(sys.modules)
    gc.disable()
    try:
        yield
    finally:
        if len(sys.modules) > known:
            gc.freeze()
        if collects:
            gc.enable()


def _prepare_for_gpus(environ: MutableMapping[str, str]) -> None:
    """Set the variables that CUDA, NCCL and PyTorch's allocator read when they start.

    A rank has an NCCL communicator for each group, and two for each neighbour in the pipeline.
    Without a GPU the variables have no effect.
    """
    # Kernels of two communicators that ranks launch in different orders wait for each other for
    # ever; so NCCL (2.26 on) runs them in the order of the host's calls, which all ranks share.
    # From CUDA 12.3 on they still overlap (NCCL user guide, environment variables).
    environ.setdefault("NCCL_LAUNCH_ORDER_IMPLICIT", "1")
    # Streams share the device's queues, 8 by default: work after a message that waits for
    # its other end, in the same queue, waits too. 32 is the most (CUDA programming guide).
    environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    # Tensors of many sizes leave gaps in fixed blocks of memory; blocks that grow have fewer
    # (PyTorch, CUDA semantics). The older name still counts, where the user has set that one.
    if "PYTORCH_CUDA_ALLOC_CONF" not in environ:
        environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")


def check_singleton(world_size: int, environ: Mapping[str, str] = os.environ) -> None:
    """Refuse N silent worlds of one rank where the launcher started N ranks of one world.

    Raises InputError with the reason and the fix.
    """
    if world_size > 1:
        return
    for variable in SIZE_VARIABLES:
        started = environ.get(variable, "1")
        if started.isdigit() and int(started) > 1:
            raise InputError(
                f"MPI sees a world of 1 rank, but {variable} says {started}: the launcher and this "
                "MPI library do not speak the same protocol. Use the mpirun of the MPI that mpi4py "
                "loads, or give srun its --mpi (srun --mpi=list; Open MPI: pmix, MPICH: pmi2)"
            )
