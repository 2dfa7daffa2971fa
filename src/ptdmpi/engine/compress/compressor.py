"""The contract of a compressor, and where its randomness comes from."""

import hashlib
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ptdmpi.model.random import GOLDEN, fold, mix, shift_right

# The place, among the keys of data ranks, of what all of them draw alike.
EVERYBODY = -1


def unit_number(name: str, line: int, run: int) -> int:
    """What tells a unit from all others of a model, in 64 bits: a hash of the parameter's name, of
    the unit's first line there, and of which run of these lines it is."""
    digest = hashlib.blake2b(f"{name}/{line}/{run}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


@dataclass(frozen=True)
class Draws:
    """Random numbers of some units, without a generator: hashes of (seed, step, round), data rank,
    unit and element, so that no layout, no resumed run and no receiver draws others.

    `units` [n] int64 are their numbers, `key` that of seed, step and round, `source` the data rank
    whose values are compressed. `host`: the numbers once more, in the memory of the host, where
    `units` stand on a device: what follows from them alone is known without waiting for it.
    """

    units: Tensor
    key: int
    source: int = 0
    host: Tensor | None = None

    @property
    def on_host(self) -> "Draws":
        """The same on the host."""
        return self if self.host is None else replace(self, units=self.host, host=None)

    def of(self, source: int) -> "Draws":
        """Those of another data rank."""
        return replace(self, source=source)

    def rows(self, some: Tensor | slice) -> "Draws":
        """Those of some of the units."""
        host = None if self.host is None else self.host[some]
        return replace(self, units=self.units[some], host=host)

    def shared(self) -> Tensor:
        """[n] float64 in [0, 1), of 32 bits: one number for each unit, on all data ranks alike."""
        hashed = mix(self.units + fold(self.key, EVERYBODY))
        return shift_right(hashed, 32).to(torch.float64) * 2.0**-32

    def hashes(self, length: int) -> Tensor:
        """[n, length] int64, all bits random; no two of a unit are equal."""
        columns = torch.arange(length, device=self.units.device) * GOLDEN
        return mix(mix(self.units + fold(self.key, self.source))[:, None] + columns)

    def uniform(self, length: int, dtype: torch.dtype) -> Tensor:
        """[n, length] in [0, 1), of 24 bits: exact in every float type that gradients have."""
        return shift_right(self.hashes(length), 40).to(dtype) * 2.0**-24


class Compressor(ABC):
    """Rows of numbers to bytes and back; C(x) is what `decode` makes of `encode`'s.

    A row is a unit, compressed for itself; none is longer than `longest`. Either E C(x) = x and
    E ||C(x) - x||^2 <= omega ||x||^2 (`unbiased`), or E ||C(x) - x||^2 <= (1 - delta) ||x||^2. How
    long a code is follows from the draws alone, which all data ranks share.
    """

    unbiased = False

    def __init__(self, longest: int) -> None:
        self.longest = longest

    @abstractmethod
    def code_bytes(self, draws: Draws, length: int, dtype: torch.dtype) -> int:
        """The length of the code of the units of `draws`, each of `length` numbers."""

    @abstractmethod
    def encode(self, x: Tensor, draws: Draws) -> Tensor:
        """[n, length] -> [code_bytes] uint8."""

    @abstractmethod
    def decode(self, code: Tensor, draws: Draws, length: int, dtype: torch.dtype) -> Tensor:
        """What `encode` has made [code_bytes] uint8 of, compressed: [n, length]. `draws` are of
        the rank that encoded."""

    def omega(self, length: int) -> float:
        """The bound of the variance; of an unbiased compressor only."""
        raise NotImplementedError(f"{type(self).__name__} is not unbiased")

    @abstractmethod
    def delta(self, length: int) -> float:
        """The least contraction, in expectation, of units of this length; 0 of an unbiased one
        that does not contract."""
