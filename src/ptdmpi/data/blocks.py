"""Checksums for blocks of a shard's tokens. Training compares the tokens that it reads with these
checksums.

A shard is an HDF5 file. Its HDF5 dataset `token_blocks` has the CRC-32 of each block of
BLOCK_TOKENS tokens. The last block may be shorter. Shards that older versions of ptdmpi wrote do
not have `token_blocks`, and their tokens are read without verification.
"""

import zlib
from pathlib import Path
from typing import Protocol

import h5py
import numpy as np

from ptdmpi.config import InputError
from ptdmpi.data.header import ShardHeader, format_checksum

BLOCKS = "token_blocks"
# The number of tokens of a block. If the tokens have the type uint16, a block has 32 KiB. With this
# size, computing the checksum of a block takes about as long as a page fault on a file that is not
# cached.
BLOCK_TOKENS = 1 << 14


class Tokens(Protocol):
    """The interface of a shard's tokens, which are read as slices with a start and a stop."""

    def __getitem__(self, part: slice) -> np.ndarray:
        """Return the tokens of a slice."""


class BlockSums:
    """The checksums of a shard's blocks, computed from a stream of tokens that arrives in pieces of
    any size."""

    def __init__(self) -> None:
        self._sums: list[int] = []
        self._last = 0  # the checksum of the block that is not full yet.
        self._filled = 0  # the number of tokens in the block that is not full yet

    def add(self, piece: np.ndarray) -> None:
        """Add the next tokens of the stream to the checksums. The tokens have the shard's data
        type."""
        start = 0
        while start < piece.size:
            part = piece[start : start + BLOCK_TOKENS - self._filled]
            self._last = zlib.crc32(part.data, self._last)
            self._filled += part.size
            start += part.size
            if self._filled == BLOCK_TOKENS:
                self._sums.append(self._last)
                self._last = 0
                self._filled = 0

    def values(self) -> np.ndarray:
        """Return the checksums of all tokens added so far, uint32 [blocks]. The last block may be
        incomplete."""
        sums = list(self._sums)
        if self._filled:
            sums.append(self._last)
        return np.array(sums, dtype="<u4")


def block_sums(path: Path, tokens: int) -> np.ndarray | None:
    """Return the stored checksums of the blocks of a shard with `tokens` tokens, uint32 [blocks].
    Return None if the shard does not store checksums. Raise InputError if the checksums are
    damaged."""
    blocks = -(-tokens // BLOCK_TOKENS)
    try:
        with h5py.File(path, "r") as file:
            if BLOCKS not in file:
                return None
            stored = file[BLOCKS]
            if stored.shape != (blocks,) or stored.dtype != np.dtype("<u4"):
                raise InputError(f"shard {path}: {BLOCKS} does not have {blocks} blocks: damaged")
            return np.asarray(stored[()])
    except (OSError, RuntimeError, AttributeError) as error:
        raise InputError(f"shard {path}: {BLOCKS} cannot be read: {error}") from None


class VerifiedTokens:
    """The tokens of a shard. Each block is verified when one of its tokens is first read."""

    def __init__(self, tokens: Tokens, header: ShardHeader, sums: np.ndarray) -> None:
        """Store the tokens, the header, and the checksums `sums` that `block_sums` returns."""
        self._tokens = tokens
        self._header = header
        self._sums = sums
        self._verified = bytearray(sums.size)

    def __getitem__(self, part: slice) -> np.ndarray:
        """Return the tokens of the slice `part`. Raise InputError if a block that the slice
        overlaps is damaged."""
        first = part.start // BLOCK_TOKENS
        last = (part.stop - 1) // BLOCK_TOKENS
        verified = self._verified
        if not (verified[first] and verified[last]) or last - first > 1:
            for block in range(first, last + 1):
                if not verified[block]:
                    self._verify(block)
        return self._tokens[part]

    def _verify(self, block: int) -> None:
        start = block * BLOCK_TOKENS
        stop = min(start + BLOCK_TOKENS, self._header.tokens)
        checksum = zlib.crc32(np.ascontiguousarray(self._tokens[start:stop]).data)
        recorded = format_checksum(int(self._sums[block]))
        part = f"tokens {start} to {stop - 1} have"
        require_checksum(self._header.path, part, format_checksum(checksum), recorded)
        self._verified[block] = 1


def require_checksum(path: Path, part: str, actual: str, recorded: str) -> None:
    """Raise InputError if the computed checksum `actual` of a part of the shard `path` differs from
    the checksum `recorded` in the shard. `part` names the part in the message, together with a
    verb, for example "weights have"."""
    if actual != recorded:
        raise InputError(
            f"shard {path}: {part} checksum {actual}, recorded {recorded}: damaged; restore the "
            'file, or make it again with ptdmpi-data (data.verify = "off" would train on it as '
            "it is)"
        )
