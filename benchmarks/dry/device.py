"""Counters of the launches, waits and allocations that this process made on the null GPU, a
stand-in for a GPU that computes nothing."""

import ctypes
from typing import NamedTuple

from benchmarks.dry.build import STATE


class Events(NamedTuple):
    """The numbers of events on the null GPU so far, in the order of `enum null_event`
    (null/null.h): `launches` of kernels, `copies` and fills of memory, waits of the host for the
    device (`syncs`), `allocations` of memory, and launches by cuDNN (`cudnn`), which are also
    counted in `launches`."""

    launches: int
    copies: int
    syncs: int
    allocations: int
    cudnn: int


class NullGpu:
    """The counters of the null GPU whose libraries this process has loaded."""

    def __init__(self) -> None:
        """Open the library of the counters. Raise OSError if this process does not have the
        environment of the null GPU."""
        self._library = ctypes.CDLL(STATE)
        self._library.null_count.restype = ctypes.c_ulong

    def events(self) -> Events:
        """Return the numbers of events so far."""
        return Events(*(self._library.null_count(number) for number in range(len(Events._fields))))

    def launched(self) -> int:
        """Return the number of kernels, copies and fills that the host has launched so far."""
        return self._library.null_count(0) + self._library.null_count(1)
