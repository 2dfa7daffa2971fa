"""The environment variables of a rank, which must be set before mpi4py, torch or h5py is imported.

Some variables differ from site to site, for example those that bind processes to cores or configure
the network; this module does not change them. It sets only variables whose defaults are wrong on
every machine, and only if the user has not set them.
"""

import contextlib
import gc
import os
import resource
import sys
from collections.abc import Iterator, Mapping, MutableMapping

from ptdmpi.base import launched
from ptdmpi.base.disk import home_folder
from ptdmpi.base.say import note
from ptdmpi.base.words import counted
from ptdmpi.config import InputError

# Address space in bytes with which PyTorch and MPI can be loaded; with 0.7 GB, they abort.
LEAST_ADDRESSES = 1_000_000 * 1024
# environment variables in which launchers store the number of ranks that they have started
SIZE_VARIABLES = (*launched.SIZE_VARIABLES, "SLURM_NTASKS")


def begin(what: str) -> None:
    """Print that the command `what` starts, because loading MPI and PyTorch takes seconds. Then set
    the environment variables. Call this function before importing mpi4py, torch or h5py."""
    ranks = counted(launched.launched_size(), "rank")
    note(f"ptdmpi {what}: {ranks}, loading MPI and PyTorch")
    prepare()


def prepare(environ: MutableMapping[str, str] = os.environ) -> None:
    """Set the environment variables that every rank needs. Call this function before importing
    mpi4py, torch or h5py.

    Raises InputError if the current directory has been removed, or if the limit on memory is too
    small to load PyTorch.
    """
    _require_address_space()
    try:
        os.getcwd()
    # raise InputError here, because otherwise Open MPI or MKL would end the process with a less
    # helpful message
    except OSError as error:
        raise InputError(
            f"the current directory is gone ({error.strerror}); cd to one that exists"
        ) from None
    # cron, systemd and some containers do not set HOME, and Open MPI needs it
    if "HOME" not in environ:
        environ["HOME"] = str(home_folder(environ))
    # Lustre and GPFS often refuse the locks that HDF5 requests. Ranks need no locks, because they
    # only read HDF5 files.
    environ.setdefault("HDF5_USE_FILE_LOCKING", "FALSE")
    # GPU-aware MPI together with NCCL can deadlock on Cray. ptdmpi never passes GPU buffers to MPI,
    # so it does not need GPU-aware MPI.
    environ.setdefault("MPICH_GPU_SUPPORT_ENABLED", "0")
    # UCX, a library that Open MPI loads, would replace the program's handler of SIGHUP, so that a
    # run would not stop on SIGHUP (UCX documentation, UCX_DEBUG_SIGNO).
    environ.setdefault("UCX_DEBUG_SIGNO", "0")
    _prepare_for_gpus(environ)
    local_ranks = int(environ.get("OMPI_COMM_WORLD_LOCAL_SIZE", "1"))
    if local_ranks > len(os.sched_getaffinity(0)):
        # If ranks share a core, a rank that waits in a busy loop takes the core away from the rank
        # that it waits for. With this variable, the waiting rank yields the core; without the
        # variable, a message took 4 ms.
        environ.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")


@contextlib.contextmanager
def loading() -> Iterator[None]:
    """Return a context for imports: it suspends the garbage collector, and excludes the objects of
    the imported modules from later collections. Objects of modules are never freed. Without this
    context, the collector scans them again and again, which takes a tenth of PyTorch's import
    time."""
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
    """Set the variables that CUDA, NCCL and PyTorch's allocator read when they start. The variables
    have no effect on a rank without a GPU.

    Two of the variables are needed because a rank uses many NCCL communicators at the same time:
    one for each group, and two for each neighbour in the pipeline.
    """
    # If ranks launch the kernels of two communicators in different orders, the kernels wait for
    # each other for ever. With this variable, NCCL (2.26 or later) runs kernels in the order of the
    # host's calls, which is the same on all ranks. From CUDA 12.3 on, the kernels of two
    # communicators can still overlap (NCCL user guide, environment variables).
    environ.setdefault("NCCL_LAUNCH_ORDER_IMPLICIT", "1")
    # Streams share the device's hardware queues, 8 by default. If a message waits for its peer, all
    # later work in the same queue waits, too. 32 queues are the maximum (CUDA programming guide).
    environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    # Tensors of many sizes leave gaps in memory blocks of fixed size. Blocks that can grow have
    # fewer gaps (PyTorch, CUDA semantics). PyTorch still reads the variable under its older name,
    # PYTORCH_CUDA_ALLOC_CONF, so a value that the user has set there is kept.
    if "PYTORCH_CUDA_ALLOC_CONF" not in environ:
        environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")


def check_singleton(world_size: int, environ: Mapping[str, str] = os.environ) -> None:
    """Raise InputError if the launcher has started several ranks, but MPI has given each rank a
    separate world with one rank.

    The error message names the reason and the remedy.
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


def _require_address_space() -> None:
    """Raise InputError if the process may use less than `LEAST_ADDRESSES` of address space. The
    libraries of PyTorch and MPI would then end the process with messages of their own."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if 0 <= limit < LEAST_ADDRESSES:
        raise InputError(
            f"the limit on virtual memory (ulimit -v) is {limit // 1024} kB, which is too small to "
            f"load PyTorch and MPI; legal: unlimited, or at least {LEAST_ADDRESSES // 1024}"
        )
