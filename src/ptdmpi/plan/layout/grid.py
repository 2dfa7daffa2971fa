"""The process grid: which rank stands where on the named axes, and which ranks form a group.

Pure arithmetic on any rank, so that a planner can ask about 3072 ranks and a communicator about
its own. Axes are data: whoever splits communicators, watches ranks or deals out state asks a grid
for its axes by name, so a new axis is a row of `AXES` and not one more field everywhere.
"""

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ptdmpi.config import Config, InputError


@dataclass(frozen=True)
class Axis:
    """What ranks at different places of an axis have that others on it do not.

    `cuts_state`: other parts of the training state, or of some parameters' state at least. On every
    other axis the ranks hold the same. `other_parameters`: parameters of other names, so that
    nobody knows the names of all of them. `reads_samples`: other samples. `cuts_sequence`: other
    positions of the same samples.
    """

    cuts_state: bool = False
    other_parameters: bool = False
    reads_samples: bool = False
    cuts_sequence: bool = False

    @property
    def sums_losses(self) -> bool:
        """True if its ranks see other tokens: losses, their counts and gradients are summed."""
        return self.reads_samples or self.cuts_sequence


# The axes of this trainer, fastest first. Consecutive ranks share a node, so the axis that
# communicates most stands first (Narayanan et al. 2021, arXiv 2104.04473, section 3.2,
# takeaway 1), and the pipeline axis, with one message a microbatch, last. The d data ranks are two
# axes: neighbours share out state (`zero`), and groups of them hold copies of it.
AXES: Mapping[str, Axis] = {
    "tensor": Axis(cuts_state=True),
    "shard": Axis(cuts_state=True, reads_samples=True),
    "replicate": Axis(reads_samples=True),
    "pipeline": Axis(cuts_state=True, other_parameters=True),
}
# Groups that follow from the axes: all ranks; those that hold the same state; those that read
# different samples for the same part of the model; those that see different tokens for it; those
# that hold parameters of different names; and the first and the last of the pipeline axis, which
# both hold a tied table.
WORLD, REPLICAS, DATA, LOSSES = "world", "replicas", "data", "losses"
PARAMETERS, ENDS = "parameters", "ends"
# Groups that go along several axes: which these are.
ALONG: Mapping[str, Callable[[Axis], bool]] = {
    REPLICAS: lambda axis: not axis.cuts_state,
    DATA: lambda axis: axis.reads_samples,
    LOSSES: lambda axis: axis.sums_losses,
    PARAMETERS: lambda axis: axis.other_parameters,
}

Coordinates = Mapping[str, int]  # name of an axis -> place on it, counted from 0


@dataclass(frozen=True, init=False)
class Grid:
    """Axes by name with their sizes, the one that varies fastest first.

    `Grid({"tensor": 2, "replicate": 3})`: ranks 0 and 1 are neighbours on the tensor axis. Raises
    InputError unless each size is at least 1.
    """

    sizes: tuple[tuple[str, int], ...]

    def __init__(self, sizes: Mapping[str, int]) -> None:
        for axis, size in sizes.items():
            if size < 1:
                raise InputError(f"{axis} parallel size {size}: must be at least 1")
        object.__setattr__(self, "sizes", tuple(sizes.items()))

    def __getitem__(self, axis: str) -> int:
        """Number of places on `axis`; raises KeyError for one that this grid does not have."""
        return dict(self.sizes)[axis]

    @property
    def axes(self) -> tuple[str, ...]:
        """Names of the axes, fastest first."""
        return tuple(axis for axis, _ in self.sizes)

    @property
    def size(self) -> int:
        """Number of ranks, the product over the axes: n = t p d."""
        return math.prod(size for _, size in self.sizes)

    def resized(self, axis: str, size: int) -> "Grid":
        """This grid with another number of places on one axis that it has."""
        return Grid({**dict(self.sizes), axis: size})

    def coordinates(self, rank: int) -> Coordinates:
        """Place of `rank` on each axis; raises ValueError for a rank outside the grid."""
        if not 0 <= rank < self.size:
            raise ValueError(f"rank {rank} is outside the grid: 0 to {self.size - 1}")
        places = {}
        for axis, size in self.sizes:
            rank, places[axis] = divmod(rank, size)
        return places

    def rank(self, coordinates: Coordinates) -> int:
        """Rank at `coordinates`, of all axes; raises ValueError for a place outside the grid."""
        inside = all(0 <= coordinates.get(axis, -1) < size for axis, size in self.sizes)
        if not inside or len(coordinates) != len(self.sizes):
            raise ValueError(f"{dict(coordinates)} is outside the grid {dict(self.sizes)}")
        rank = 0
        for axis, size in reversed(self.sizes):
            rank = rank * size + coordinates[axis]
        return rank

    def group(self, rank: int, *axes: str) -> tuple[int, ...]:
        """Ranks that differ from `rank` on `axes` at most, ascending; `rank` is one of them.

        Raises ValueError for a name that is no axis of this grid.
        """
        for axis in axes:
            if axis not in self.axes:
                raise ValueError(f'"{axis}" is no axis: {", ".join(self.axes)}')
        here = self.coordinates(rank)
        # ranks ascend when the fastest axis runs fastest: product() runs its last one so
        free = [axis for axis in reversed(self.axes) if axis in axes]
        everywhere = itertools.product(*(range(self[axis]) for axis in free))
        return tuple(
            self.rank({**here, **dict(zip(free, places, strict=True))}) for places in everywhere
        )

    @property
    def groups(self) -> tuple[str, ...]:
        """Names of all groups that ranks communicate in: each axis, and what follows from them."""
        return (*self.axes, *ALONG, ENDS, WORLD)

    def members(self, rank: int, group: str) -> tuple[int, ...]:
        """The ranks of that one of the `groups` that `rank` is in, ascending.

        Empty if it is in none: only the two ends of a pipeline axis of at least 2 are in `ends`.
        """
        if group == WORLD:
            return tuple(range(self.size))
        if group in ALONG:
            return self.group(rank, *self.along(group))
        if group == ENDS:
            line = self.group(rank, "pipeline") if "pipeline" in self.axes else (rank,)
            ends = (line[0], line[-1])
            return ends if len(line) > 1 and rank in ends else ()
        return self.group(rank, group)

    def same_as(self, group: str) -> str:
        """The axis, or the first group, that has the ranks of `group`, so that one communicator
        serves both; `group` itself if there is none, and for an axis, the ends and the world."""
        axes = self.along(group)
        if not axes:
            return group
        long = self._long(group)
        if len(long) < 2:
            return (*long, *axes)[0]
        return next(other for other in ALONG if self._long(other) == long)

    def _long(self, group: str) -> list[str]:
        """The axes of a group that have several places."""
        return [axis for axis in self.along(group) if self[axis] > 1]

    def called(self, group: str) -> str:
        """What people are told of a group: an axis that has all data ranks goes by the name of
        these, whether they share out state or hold the same."""
        return DATA if group == self.same_as(DATA) else group

    def along(self, group: str) -> tuple[str, ...]:
        """The axes that a group of `ALONG` goes along; () for another group."""
        if group not in ALONG:
            return ()
        return tuple(axis for axis in self.axes if ALONG[group](axis_named(axis)))

    @property
    def data_size(self) -> int:
        """d: ranks that hold the same part of the model and read different samples."""
        return math.prod(self[axis] for axis in self.along(DATA))

    def part(self, coordinates: Coordinates) -> tuple[int, ...]:
        """Which part of the state is held there: equal wherever it is the same."""
        return tuple(coordinates[axis] for axis in self.axes if axis_named(axis).cuts_state)

    def replica(self, coordinates: Coordinates) -> tuple[int, ...]:
        """Which replica of the state a rank there belongs to: its places on the other axes."""
        return tuple(coordinates[axis] for axis in self.along(REPLICAS))

    @property
    def parts(self) -> set[tuple[int, ...]]:
        """All parts of the state, which together are the whole of it."""
        cuts = (range(size) for axis, size in self.sizes if axis_named(axis).cuts_state)
        return set(itertools.product(*cuts))


def axis_named(name: str) -> Axis:
    """What an axis does; one that is not in `AXES` holds replicas that see the same tokens."""
    return AXES.get(name, Axis())


def training_grid(data: int = 1, shards: int = 1, **sizes: int) -> Grid:
    """The grid of this trainer's axes, in their order; those that are not named have size 1. Of
    `data` ranks `shards` neighbours share out state.

    Raises ValueError for a name that is not in `AXES`, and for shards that do not divide `data`.
    """
    unknown = sizes.keys() - AXES.keys()
    if unknown:
        raise ValueError(f'"{min(unknown)}" is no axis: {", ".join(AXES)}')
    if data % shards:
        raise ValueError(f"{shards} shards do not divide {data} data ranks")
    sizes = {"shard": shards, "replicate": data // shards, **sizes}
    return Grid({axis: sizes.get(axis, 1) for axis in AXES})


def grid_of(config: Config) -> Grid:
    """The grid that a configuration trains on."""
    parallel, layout = config.parallel, config.layout
    return training_grid(
        layout.data, layout.shards, tensor=parallel.tensor, pipeline=parallel.pipeline
    )
