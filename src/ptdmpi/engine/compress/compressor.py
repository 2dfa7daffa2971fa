"""The interface of compressors, and the source of their random numbers."""

import hashlib
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ptdmpi.model.random import GOLDEN, fold, mix, shift_right

# Random numbers that must be the same on all data ranks are hashes of this value instead of the
# number of the data rank.
EVERYBODY = -1


def unit_number(name: str, line: int, run: int) -> int:
    """Return the 64-bit number that identifies a compression block in a model.

    The number is a hash of three values: the name of the parameter, the number of the first line of
    the block's tile, and the number of the block in this tile (see `units`).
    """
    digest = hashlib.blake2b(f"{name}/{line}/{run}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


@dataclass(frozen=True)
class Draws:
    """Random numbers for some compression blocks. Each number is a hash of the seed, the step, the
    round of the code (see `Coder`), the data rank, the block and the element, so no random
    generator is needed. The same numbers are therefore computed in every layout, in every resumed
    run and by every receiver.

    `units` [n] int64 are the numbers of the compression blocks. `key` is the hash of seed, step and
    round. `source` is the data rank whose values are compressed. If `units` are on a device, `host`
    has the same numbers in host memory, so that the host can compute with them without waiting for
    the device.
    """

    units: Tensor
    key: int
    source: int = 0
    host: Tensor | None = None

    @property
    def on_host(self) -> "Draws":
        """Return an object whose methods return the same random numbers, but compute them on the
        host."""
        return self if self.host is None else replace(self, units=self.host, host=None)

    def of(self, source: int) -> "Draws":
        """Return the random numbers of data rank `source` for the same blocks."""
        return replace(self, source=source)

    def rows(self, some: Tensor | slice) -> "Draws":
        """Return the random numbers of the blocks that the index `some` selects."""
        host = None if self.host is None else self.host[some]
        return replace(self, units=self.units[some], host=host)

    def shared(self) -> Tensor:
        """Return uniform random numbers [n] float64 in [0, 1) with 32 random bits: one number for
        each block, the same on all data ranks."""
        hashed = mix(self.units + fold(self.key, EVERYBODY))
        return shift_right(hashed, 32).to(torch.float64) * 2.0**-32

    def hashes(self, length: int) -> Tensor:
        """Return random int64 numbers [n, length] in which all 64 bits are random. No two numbers
        of a block are equal."""
        columns = torch.arange(length, device=self.units.device) * GOLDEN
        return mix(mix(self.units + fold(self.key, self.source))[:, None] + columns)

    def uniform(self, length: int, dtype: torch.dtype) -> Tensor:
        """Return uniform random numbers [n, length] in [0, 1) with 24 random bits. Gradients are in
        float32 or float64, which represent these numbers exactly."""
        return shift_right(self.hashes(length), 40).to(dtype) * 2.0**-24


class Compressor(ABC):
    """The base class of compressors. A compressor encodes rows of numbers as bytes, which are
    called a code, and decodes the code. C(x) denotes the values that are decoded from the code of
    x.

    Each row is a compression block. It has at most `longest` numbers, and is compressed
    independently of other rows. An `unbiased` compressor has E C(x) = x and E ||C(x) - x||^2 <=
    omega ||x||^2, where E is the expected value. Any other compressor has E ||C(x) - x||^2 <= (1 -
    delta) ||x||^2; it contracts if delta > 0. The length of a code depends only on random numbers
    that are the same on all data ranks, so each rank can compute the lengths of the codes that it
    will receive.
    """

    unbiased = False

    def __init__(self, longest: int) -> None:
        self.longest = longest

    @abstractmethod
    def code_bytes(self, draws: Draws, length: int, dtype: torch.dtype) -> int:
        """Return the length, in bytes, of the code of all compression blocks in `draws`. Each of
        the blocks has `length` numbers."""

    @abstractmethod
    def encode(self, x: Tensor, draws: Draws) -> Tensor:
        """Encode x [n, length] as [code_bytes] uint8."""

    @abstractmethod
    def decode(self, code: Tensor, draws: Draws, length: int, dtype: torch.dtype) -> Tensor:
        """Return the decoded values, [n, length], of a code [code_bytes] uint8 that `encode` has
        returned. `draws` must be the random numbers with which the code was encoded."""

    def omega(self, length: int) -> float:
        """Return omega, the bound of the relative variance for blocks of `length` numbers (see the
        class docstring). Only unbiased compressors have an omega."""
        raise NotImplementedError(f"{type(self).__name__} is not unbiased")

    @abstractmethod
    def delta(self, length: int) -> float:
        """Return delta, a lower bound of the expected contraction of blocks of `length` numbers
        (see the class docstring). Return 0 for an unbiased compressor that does not contract."""
