"""Freed memory that the C library keeps, because a step frees and requests the same large tensors.

By default glibc returns a freed block of more than 128 KiB to 32 MiB to the kernel. The next step
then faults the block's pages in again, one by one, and the kernel fills each with zeros first. If
glibc keeps the memory, its pages are faulted in once. The process then holds its peak at all times,
which every step would reach anyway.
"""

import contextlib
import ctypes
from collections.abc import Mapping

# names of mallopt(3) and their numbers in malloc.h
_TRIM_THRESHOLD = -1
_MMAP_THRESHOLD = -3
# larger blocks, such as a rank's flat parameters, live as long as the run, and would leave holes
LARGEST_KEPT = 1 << 30
# a user who sets one of these variables has made another choice
VARIABLES = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES")


def keep_freed(environ: Mapping[str, str]) -> bool:
    """Have the C library keep freed blocks of up to LARGEST_KEPT bytes for this process. Return
    True if it does. It does not if a user's variable sets this, or if the C library is not
    glibc."""
    if any(name in environ for name in VARIABLES):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    return bool(mallopt(_MMAP_THRESHOLD, LARGEST_KEPT) and mallopt(_TRIM_THRESHOLD, -1))


def give_back() -> None:
    """Return the memory that is free now to the kernel, once, because a step may not need the
    memory of the preparations."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)
