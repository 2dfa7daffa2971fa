"""What the disk is told while a large file is written, and at its end."""

import os
from pathlib import Path
from typing import BinaryIO


def start_writing_out(file: BinaryIO, start: int, end: int) -> None:
    """Have the kernel begin with bytes [start, end), which were written: the disk then works while
    we do, and the sync at the end has little left. Linux does so when told that written pages will
    not be needed; those that have reached the disk by then are dropped from memory."""
    os.posix_fadvise(file.fileno(), start, end - start, os.POSIX_FADV_DONTNEED)


def sync(path: Path) -> None:
    """Have a file, or the names in a directory, outlive a crash."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
