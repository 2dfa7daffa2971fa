"""The process grid: which rank stands where on the tensor, data and pipeline axes.

Pure arithmetic on any rank, so that a planner can ask about 3072 ranks and a communicator about
its own. The tensor axis varies fastest, then data, then pipeline: consecutive ranks share a node,
and tensor parallelism communicates most (Narayanan et al. 2021, arXiv 2104.04473, section 3.2,
takeaway 1).
"""

from dataclasses import dataclass, fields, replace

from ptdmpi.config import InputError


@dataclass(frozen=True)
class Coordinates:
    """Place of one rank on each axis of the grid, counted from 0."""

    tensor: int
    data: int
    pipeline: int


@dataclass(frozen=True)
class Grid:
    """Sizes t, p, d of the axes. Raises InputError unless each is at least 1."""

    tensor: int
    pipeline: int
    data: int

    def __post_init__(self) -> None:
        for axis in fields(self):
            size = getattr(self, axis.name)
            if size < 1:
                raise InputError(f"{axis.name} parallel size {size}: must be at least 1")

    @property
    def size(self) -> int:
        """Number of ranks, n = t p d."""
        return self.tensor * self.pipeline * self.data

    def coordinates(self, rank: int) -> Coordinates:
        """Place of `rank`; raises ValueError for a rank outside the grid."""
        if not 0 <= rank < self.size:
            raise ValueError(f"rank {rank} is outside the grid: 0 to {self.size - 1}")
        rest, tensor = divmod(rank, self.tensor)
        pipeline, data = divmod(rest, self.data)
        return Coordinates(tensor=tensor, data=data, pipeline=pipeline)

    def rank(self, coordinates: Coordinates) -> int:
        """Rank at `coordinates`; raises ValueError for a place outside the grid."""
        for axis in fields(self):
            if not 0 <= getattr(coordinates, axis.name) < getattr(self, axis.name):
                raise ValueError(f"{coordinates} is outside {self}")
        row = coordinates.pipeline * self.data + coordinates.data
        return row * self.tensor + coordinates.tensor

    def group(self, rank: int, axis: str) -> tuple[int, ...]:
        """Ranks that share every other coordinate with `rank`, ascending along `axis`.

        `axis` is "tensor", "pipeline" or "data"; raises ValueError for another name.
        """
        if axis not in {field.name for field in fields(self)}:
            raise ValueError(f'axis "{axis}": must be tensor, pipeline or data')
        here = self.coordinates(rank)
        return tuple(
            self.rank(replace(here, **{axis: place})) for place in range(getattr(self, axis))
        )
