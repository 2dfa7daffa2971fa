"""Matrices in few bits: each row in blocks, of each block one scale in full and a code of every
element. What codes stand for, and how many bytes they take; without torch."""

import itertools
from dataclasses import dataclass
from typing import get_args

from ptdmpi.config.legality import CodesName
from ptdmpi.config.sections import QuantizeConfig

CODES = get_args(CodesName)
# Who works on a matrix does so on so many elements at once, with so many bytes of each beside.
CHUNK_ELEMENTS, CHUNK_BYTES = 1 << 18, 24
SCALE_BYTES = 4  # float32, whatever the compute type is

# Quantiles of a normal distribution, half of them for each sign, so that each of the 16 is met
# equally often, zero among them (Dettmers et al. 2023, arXiv 2305.14314, section 3, appendix E).
NF4 = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)


@dataclass(frozen=True)
class LowBit:
    """A matrix [o, i] in few bits: `codes` of its elements, and a scale of each `block` of a row.

    An element is its code's level times the scale of its block. Levels of int8 and int4 are whole
    numbers, and the greatest magnitude of a block is the last positive one (absmax); those of nf4
    lie between -1 and 1.
    """

    codes: CodesName
    block: int

    @classmethod
    def of(cls, section: QuantizeConfig) -> "LowBit | None":
        """What a run asks for; None: its products take weights as they are."""
        return None if section.weights == "none" else cls(section.weights, section.block)

    @property
    def bits(self) -> int:
        """How many a code has."""
        return 8 if self.codes == "int8" else 4

    @property
    def levels(self) -> tuple[float, ...]:
        """What each code stands for, ascending; a float32 holds them exactly."""
        if self.codes == "nf4":
            return NF4
        half = 2 ** (self.bits - 1)
        return tuple(float(level) for level in range(-half, half))

    @property
    def reach(self) -> float:
        """The level of a block's greatest magnitude."""
        return self.levels[-1]

    @property
    def middles(self) -> tuple[float, ...]:
        """Between which two levels values change from one to the next: ascending, one fewer."""
        return tuple((low + high) / 2 for low, high in itertools.pairwise(self.levels))

    def code_shape(self, rows: int, columns: int) -> tuple[int, int]:
        """The bytes of a matrix's codes, row by row."""
        return rows, columns * self.bits // 8

    def scale_shape(self, rows: int, columns: int) -> tuple[int, int]:
        """The scales of a matrix."""
        return rows, columns // self.block

    def bytes_of(self, rows: int, columns: int) -> int:
        """Bytes of a matrix: its codes and its scales."""
        scales = rows * (columns // self.block) * SCALE_BYTES
        return rows * columns * self.bits // 8 + scales

    @property
    def bits_per_element(self) -> float:
        """How many an element of a large matrix takes, scales included."""
        return self.bits + 8 * SCALE_BYTES / self.block
