"""The contract of a compressor, and the source of its random numbers."""

import hashlib
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ptdmpi.model.random import GOLDEN, fold, mix, shift_right

# It replaces a data rank's number in the hash of draws that are the same on all data ranks.
EVERYBODY = -1


def unit_number(name: str, line: int, run: int) -> int:
    """Return the 64-bit number that identifies a unit in a model.

    It is a hash of the parameter's name, of the unit's first line in the parameter, and of the
    number of the run within these lines.
    """
    digest = hashlib.blake2b(f"{name}/{line}/{run}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


@dataclass(frozen=True)
class Draws:
    """Random numbers of some units, without a generator: hashes of (seed, step, round), data rank,
    unit and element. Every layout, every resumed run and every receiver therefore draws the same
    numbers.

    `units` [n] int64 are the numbers of the units. `key` is the hash of seed, step and round.
    `source` is the data rank whose values are compressed. `host` has the same numbers in the host's
    memory if `units` are on a device, so that the host can compute with them without waiting for
    the device.
    """

    units: Tensor
    key: int
    source: int = 0
    host: Tensor | None = None

    @property
    def on_host(self) -> "Draws":
        """Return the same draws with `units` in the host's memory."""
        return self if self.host is None else replace(self, units=self.host, host=None)

    def of(self, source: int) -> "Draws":
        """Return the draws of data rank `source` for the same units."""
        return replace(self, source=source)

    def rows(self, some: Tensor | slice) -> "Draws":
        """Return the draws of some of the units."""
        host = None if self.host is None else self.host[some]
        return replace(self, units=self.units[some], host=host)

    def shared(self) -> Tensor:
        """Return [n] float64 in [0, 1), of 32 bits: one number for each unit, the same on all data
        ranks."""
        hashed = mix(self.units + fold(self.key, EVERYBODY))
        return shift_right(hashed, 32).to(torch.float64) * 2.0**-32

    def hashes(self, length: int) -> Tensor:
        """Return [n, length] int64 with all bits random; no two numbers of a unit are equal."""
        columns = torch.arange(length, device=self.units.device) * GOLDEN
        return mix(mix(self.units + fold(self.key, self.source))[:, None] + columns)

    def uniform(self, length: int, dtype: torch.dtype) -> Tensor:
        """Return [n, length] in [0, 1), of 24 bits: exact in every float type that gradients
        have."""
        return shift_right(self.hashes(length), 40).to(dtype) * 2.0**-24


class Compressor(ABC):
    """A map from rows of numbers to bytes and back; C(x) is the result of `decode` on the code of
    x.

    Each row is a unit and is compressed alone; none is longer than `longest`. An `unbiased`
    compressor has E C(x) = x and E ||C(x) - x||^2 <= omega ||x||^2. Any other has E ||C(x) - x||^2
    <= (1 - delta) ||x||^2. The length of a code follows from the draws alone, which all data ranks
    share.
    """

    unbiased = False

    def __init__(self, longest: int) -> None:
        self.longest = longest

    @abstractmethod
    def code_bytes(self, draws: Draws, length: int, dtype: torch.dtype) -> int:
        """Return the length in bytes of the code of the units of `draws`, each of `length`
        numbers."""

    @abstractmethod
    def encode(self, x: Tensor, draws: Draws) -> Tensor:
        """Encode x [n, length] as [code_bytes] uint8."""

    @abstractmethod
    def decode(self, code: Tensor, draws: Draws, length: int, dtype: torch.dtype) -> Tensor:
        """Return the compressed values, [n, length], from the [code_bytes] uint8 of `encode`;
        `draws` are those of the rank that encoded."""

    def omega(self, length: int) -> float:
        """Return the bound of the variance, omega; only unbiased compressors have one."""
        raise NotImplementedError(f"{type(self).__name__} is not unbiased")

    @abstractmethod
    def delta(self, length: int) -> float:
        """Return the least contraction, in expectation, of units of this length; 0 for an unbiased
        compressor that does not contract."""
