"""Settings of the C library's allocator: freed memory stays in the process, because every training
step frees and requests the same large tensors.

By default glibc returns freed blocks to the kernel if they are larger than a limit, which it adapts
between 128 KiB and 32 MiB. In the next step every page of the block causes a page fault, and the
kernel fills it with zeros. If glibc keeps the memory, these page faults happen only once. The
process then keeps its peak memory at all times, which every step would reach anyway.
"""

import contextlib
import ctypes
import resource
from collections.abc import Iterator, Mapping
from pathlib import Path

# names of mallopt(3) and their numbers in malloc.h
_TRIM_THRESHOLD = -1
_MMAP_THRESHOLD = -3
# Blocks above this size, such as a rank's flat parameters, live as long as the run. They would
# leave holes.
LARGEST_KEPT = 1 << 30
# If a user has set one of these variables, that setting stays.
VARIABLES = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES")


def keep_freed(environ: Mapping[str, str]) -> bool:
    """Make the C library keep freed blocks of up to LARGEST_KEPT bytes in this process. Return True
    if the C library keeps them. Nothing is set if one of the user's variables exists, or if the C
    library is not glibc."""
    if any(name in environ for name in VARIABLES):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    return bool(mallopt(_MMAP_THRESHOLD, LARGEST_KEPT) and mallopt(_TRIM_THRESHOLD, -1))


def give_back() -> None:
    """Return all memory that is free now to the kernel, once. This free memory was used to prepare
    the run, and a step may not need it."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


@contextlib.contextmanager
def at_most(further_bytes: int) -> Iterator[None]:
    """Limit the memory that this process may allocate in the block, in addition to what it has.
    Python raises MemoryError if the limit is exceeded. A lower limit of the user stays."""
    former, hard = resource.getrlimit(resource.RLIMIT_DATA)
    wanted = _data_bytes() + further_bytes
    limits = [limit for limit in (former, hard, wanted) if limit != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_DATA, (min(limits), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (former, hard))


def _data_bytes() -> int:
    """Return the memory that the kernel compares with RLIMIT_DATA: the private writable memory of
    this process (VmData of proc_pid_status(5), in kB)."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmData:")[2].split()[0]) << 10
