"""Freed memory stays with the process."""

import subprocess
import sys

import pytest

from ptdmpi.base.heap import at_most
from tests.parallel import ROOT

# what a step does: large blocks that are written, freed, and asked for again
PROGRAM = """
import os, resource, sys
from ptdmpi.base.heap import give_back, keep_freed
print(keep_freed(os.environ))
import ctypes
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes, libc.memset.argtypes = [ctypes.c_void_p], [
    ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t
]
def blocks():
    taken = [libc.malloc(64 << 20) for _ in range(3)]
    for block in taken:
        libc.memset(block, 1, 64 << 20)
    for block in taken:
        libc.free(block)
blocks()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
blocks()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20
had = resident()
give_back()
print(had - resident())
"""


@pytest.mark.cases(1)
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="of glibc")
@pytest.mark.parametrize("environ", [{}, {"MALLOC_TRIM_THRESHOLD_": "131072"}])
def test_blocks_are_not_faulted_in_again(environ):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={"PYTHONPATH": str(ROOT / "src"), **environ},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    kept, faults, given_back = done.stdout.split()
    # 192 MiB are 49,152 pages of 4 KiB
    if environ:
        assert kept == "False" and int(faults) > 1000
    elif kept == "True":  # on another C library nothing is promised
        assert int(faults) < 100 and int(given_back) > 150


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="of Linux")
def test_memory_is_limited_within_a_block_only():
    with pytest.raises(MemoryError), at_most(1 << 26):
        bytearray(1 << 28)
    bytearray(1 << 28)
