"""Settings of the C library's allocator. With these settings the process keeps freed memory,
because every training step frees and requests large tensors of the same sizes.

By default glibc returns a freed block of memory to the kernel if the block is larger than a limit.
While the program runs, glibc adapts this limit, between 128 KiB and 32 MiB. The next training step
requests blocks of the same size again. Every page of the new block then causes a page fault, and
the kernel fills the page with zeros. If glibc keeps freed memory in the process, the page faults
happen only once, in the first step. The process then always occupies as much memory as at its peak,
but every training step reaches this peak anyway.
"""

import contextlib
import ctypes
import resource
from collections.abc import Iterator, Mapping
from pathlib import Path

# parameters of the function mallopt(3); the numbers are defined in malloc.h
_TRIM_THRESHOLD = -1
_MMAP_THRESHOLD = -3
# Blocks above this number of bytes are returned to the kernel when they are freed, because they
# would leave large gaps in the memory that the process keeps. An example of such a block is the
# tensor that contains all parameters of a rank.
LARGEST_KEPT = 1 << 30
# If a user has set one of these environment variables, this module changes no setting.
VARIABLES = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES")


def keep_freed(environ: Mapping[str, str]) -> bool:
    """Make the C library keep freed blocks of up to LARGEST_KEPT bytes in this process. Return True
    if the C library has accepted this setting. Nothing is changed if the user has set one of the
    environment variables VARIABLES, or if the C library is not glibc."""
    if any(name in environ for name in VARIABLES):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    return bool(mallopt(_MMAP_THRESHOLD, LARGEST_KEPT) and mallopt(_TRIM_THRESHOLD, -1))


def give_back() -> None:
    """Return all memory that is free now to the kernel. A run calls this function once, before the
    first training step, because the preparation of a run may need more memory than the training
    steps."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


@contextlib.contextmanager
def at_most(further_bytes: int) -> Iterator[None]:
    """Return a context in which this process may allocate at most `further_bytes` bytes in addition
    to its present memory. Python raises MemoryError if this limit is exceeded. If the user has set
    a lower limit, the lower limit applies."""
    former, hard = resource.getrlimit(resource.RLIMIT_DATA)
    wanted = _data_bytes() + further_bytes
    limits = [limit for limit in (former, hard, wanted) if limit != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_DATA, (min(limits), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (former, hard))


def _data_bytes() -> int:
    """Return the number of bytes that the kernel compares with RLIMIT_DATA: the private writable
    memory of this process (VmData in proc_pid_status(5), in kB)."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmData:")[2].split()[0]) << 10
