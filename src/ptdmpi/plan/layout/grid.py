"""The process grid: the coordinate of each rank on the named axes, and the groups of ranks.

The grid is pure arithmetic, so every process can compute it for any rank. For example, the planner
can compute the coordinates of all 3072 ranks of a job without starting them. Code that splits
communicators, monitors ranks or distributes state gets the axes from a grid by name. A new axis
therefore needs only an entry in `AXES`.
"""

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ptdmpi.config import Config, InputError, Layout


@dataclass(frozen=True)
class Axis:
    """The properties of an axis: how ranks with different coordinates on the axis differ.

    If `cuts_state` is True, the ranks hold different parts of the training state, at least for some
    parameters; otherwise all ranks of the axis hold the same state. If `other_parameters` is True,
    the ranks hold parameters with different names, so no rank knows the names of all parameters. If
    `cuts_width` is True, the ranks hold slices of the same linear layers. If `reads_samples` is
    True, the ranks read different samples. If `cuts_sequence` is True, the ranks process different
    positions of the same samples.
    """

    cuts_state: bool = False
    other_parameters: bool = False
    cuts_width: bool = False
    reads_samples: bool = False
    cuts_sequence: bool = False

    @property
    def sums_losses(self) -> bool:
        """Return True if the ranks of the axis see different tokens, so that losses, counts of
        tokens and gradients must be summed over them."""
        return self.reads_samples or self.cuts_sequence

    @property
    def shards_state(self) -> bool:
        """Return True if the ranks of the axis have the same part of the model and shard its
        state."""
        return self.cuts_state and self.sums_losses and not self.other_parameters

    @property
    def deals_experts(self) -> bool:
        """Return True if the ranks of the axis have different experts of the same layers."""
        return self.other_parameters and (self.sums_losses or self.cuts_width)


# The axes of the process grid of this trainer. Consecutive ranks are neighbours on the first axis.
# Neighbours usually share a node, so the axis that communicates most is first (Narayanan et al.
# 2021, arXiv 2104.04473, section 3.2, takeaway 1). The pipeline axis, with one message per
# microbatch, is last. The tensor-parallel ranks form two axes. Along "tensor_expert", ranks have
# different experts. Along "tensor_slice", ranks have slices or copies of the same experts. The
# context-parallel ranks form three axes. Along "context_expert", ranks have different experts.
# Along "context_shard", ranks shard the state (ZeRO). Along "context_replicate", ranks have copies
# of the state. In the same way, the data-parallel ranks form the axes "data_expert", "shard" and
# "replicate".
AXES: Mapping[str, Axis] = {
    "tensor_expert": Axis(cuts_state=True, other_parameters=True, cuts_width=True),
    "tensor_slice": Axis(cuts_state=True, cuts_width=True),
    "context_expert": Axis(cuts_state=True, other_parameters=True, cuts_sequence=True),
    "context_shard": Axis(cuts_state=True, cuts_sequence=True),
    "context_replicate": Axis(cuts_sequence=True),
    "data_expert": Axis(cuts_state=True, other_parameters=True, reads_samples=True),
    "shard": Axis(cuts_state=True, reads_samples=True),
    "replicate": Axis(reads_samples=True),
    "pipeline": Axis(cuts_state=True, other_parameters=True),
}
UNLISTED = Axis()  # The properties of an axis that is not in `AXES`.
# Names of groups that are derived from the axes. WORLD: all ranks. TENSOR: ranks that have slices
# of the same linear layers. REPLICAS: ranks that hold the same state. DATA: ranks that read
# different samples for the same part of the model. CONTEXT: ranks that have different positions of
# the same samples. SHARDS: ranks that shard the state. LOSSES: ranks that see different tokens for
# the same part of the model. EXPERTS: ranks that send tokens to each other and hold different
# experts of the same layers. PARAMETERS: ranks that hold parameters with different names. ENDS: the
# first and the last rank of the pipeline axis, which both hold the embedding table if it is tied to
# the output head.
WORLD, TENSOR = "world", "tensor"
REPLICAS, DATA, CONTEXT, SHARDS = "replicas", "data", "context", "shards"
LOSSES, EXPERTS, PARAMETERS, ENDS = "losses", "expert", "parameters", "ends"
# Groups of ranks along several axes: name of the group -> condition that its axes satisfy.
ALONG: Mapping[str, Callable[[Axis], bool]] = {
    TENSOR: lambda axis: axis.cuts_width,
    REPLICAS: lambda axis: not axis.cuts_state,
    DATA: lambda axis: axis.reads_samples,
    CONTEXT: lambda axis: axis.cuts_sequence,
    SHARDS: lambda axis: axis.shards_state,
    LOSSES: lambda axis: axis.sums_losses,
    EXPERTS: lambda axis: axis.deals_experts,
    PARAMETERS: lambda axis: axis.other_parameters,
}

SHARD_AXES = tuple(name for name, axis in AXES.items() if axis.shards_state)
EXPERT_AXES = tuple(name for name, axis in AXES.items() if axis.deals_experts)
TENSOR_AXES = tuple(name for name, axis in AXES.items() if axis.cuts_width)
# the tensor-parallel axis along which ranks have the same experts
SAME_EXPERTS = next(name for name in TENSOR_AXES if name not in EXPERT_AXES)

Coordinates = Mapping[str, int]  # name of an axis -> coordinate on this axis, counted from 0


@dataclass(frozen=True, init=False)
class Grid:
    """A process grid: the names and sizes of its axes. From one rank to the next, the coordinate on
    the first axis changes fastest.

    For example, in `Grid({"tensor_slice": 2, "replicate": 3})`, ranks 0 and 1 are neighbours on the
    axis "tensor_slice". Raises InputError unless each size is at least 1.
    """

    sizes: tuple[tuple[str, int], ...]

    def __init__(self, sizes: Mapping[str, int]) -> None:
        for axis, size in sizes.items():
            if size < 1:
                raise InputError(f"{axis} parallel size {size}: must be at least 1")
        object.__setattr__(self, "sizes", tuple(sizes.items()))

    def __getitem__(self, axis: str) -> int:
        """Return the size of `axis`; raise KeyError if the grid has no such axis."""
        return dict(self.sizes)[axis]

    @property
    def axes(self) -> tuple[str, ...]:
        """Return the names of the axes. Consecutive ranks are neighbours on the first axis."""
        return tuple(axis for axis, _ in self.sizes)

    @property
    def size(self) -> int:
        """Return the number of ranks, which is the product of the sizes of all axes."""
        return math.prod(size for _, size in self.sizes)

    def resized(self, axis: str, size: int) -> "Grid":
        """Return a copy of this grid in which `axis` has the size `size`. The grid must already
        have the axis `axis`."""
        return Grid({**dict(self.sizes), axis: size})

    def coordinates(self, rank: int) -> Coordinates:
        """Return the coordinate of `rank` on each axis; raise ValueError for a rank outside the
        grid."""
        if not 0 <= rank < self.size:
            raise ValueError(f"rank {rank} is outside the grid: 0 to {self.size - 1}")
        places = {}
        for axis, size in self.sizes:
            rank, places[axis] = divmod(rank, size)
        return places

    def rank(self, coordinates: Coordinates) -> int:
        """Return the rank at `coordinates`, which must have a coordinate for every axis.

        Raises ValueError for coordinates outside the grid.
        """
        inside = all(0 <= coordinates.get(axis, -1) < size for axis, size in self.sizes)
        if not inside or len(coordinates) != len(self.sizes):
            raise ValueError(f"{dict(coordinates)} is outside the grid {dict(self.sizes)}")
        rank = 0
        for axis, size in reversed(self.sizes):
            rank = rank * size + coordinates[axis]
        return rank

    def group(self, rank: int, *axes: str) -> tuple[int, ...]:
        """Return the group of `rank` along `axes`, ascending: all ranks, including `rank`, that
        have the same coordinates as `rank` on all other axes.

        Raises ValueError if a name in `axes` is not an axis of this grid."""
        for axis in axes:
            if axis not in self.axes:
                raise ValueError(f'"{axis}" is not an axis: {", ".join(self.axes)}')
        here = self.coordinates(rank)
        # the last argument of product() varies fastest, so it must be the grid's fastest axis to
        # make the ranks ascend
        free = [axis for axis in reversed(self.axes) if axis in axes]
        everywhere = itertools.product(*(range(self[axis]) for axis in free))
        return tuple(
            self.rank({**here, **dict(zip(free, places, strict=True))}) for places in everywhere
        )

    @property
    def groups(self) -> tuple[str, ...]:
        """Return the names of all groups in which ranks communicate: the axes, and the derived
        groups."""
        return (*self.axes, *ALONG, ENDS, WORLD)

    def members(self, rank: int, group: str) -> tuple[int, ...]:
        """Return the ranks in the group named `group` to which `rank` belongs, ascending.

        The result is empty if `rank` is in no group with this name. This can happen only for the
        group "ends", which consists of the first and the last rank of a pipeline with at least 2
        ranks.
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
        """Return the name of a group that has the same ranks as `group` and can therefore share its
        communicator.

        If an axis has the same ranks, the result is this axis. Otherwise the result is the first
        group in `ALONG` that has the same ranks, which may be `group` itself. If `group` is an
        axis, "ends" or the world, the result is `group`.
        """
        axes = self.along(group)
        if not axes:
            return group
        long = self._long(group)
        if len(long) < 2:
            return (*long, *axes)[0]
        return next(other for other in ALONG if self._long(other) == long)

    def _long(self, group: str) -> list[str]:
        """Return those axes of the group `group` on which this grid has more than one rank."""
        return [axis for axis in self.along(group) if self[axis] > 1]

    def called(self, group: str) -> str:
        """Return the name under which a group appears in output for users.

        An axis that has all data-parallel ranks is called "data", whether these ranks shard the
        state or hold copies of it. In the same way, an axis with all context-parallel ranks is
        called "context", and an axis with all tensor-parallel ranks is called "tensor".
        """
        names = (TENSOR, DATA, CONTEXT)
        return next((name for name in names if group == self.same_as(name)), group)

    def along(self, group: str) -> tuple[str, ...]:
        """Return the axes along which the ranks of a group in `ALONG` differ. Return () for any
        other group."""
        if group not in ALONG:
            return ()
        return tuple(axis for axis in self.axes if ALONG[group](axis_named(axis)))

    @property
    def data_size(self) -> int:
        """Return the data-parallel size: the number of ranks that read different samples for the
        same part of the model."""
        return self.size_of(DATA)

    def size_of(self, group: str) -> int:
        """Return the number of ranks in a group with the name `group`, which is a key of
        `ALONG`."""
        return math.prod(self[axis] for axis in self.along(group))

    def part(self, coordinates: Coordinates) -> tuple[int, ...]:
        """Return an identifier of the part of the training state that the rank at `coordinates`
        holds: the rank's coordinates on the axes that divide the state."""
        return tuple(coordinates[axis] for axis in self.axes if axis_named(axis).cuts_state)

    def replica(self, coordinates: Coordinates) -> tuple[int, ...]:
        """Return an identifier of the replica of the training state to which the rank at
        `coordinates` belongs: the rank's coordinates on the axes along which ranks hold the same
        state."""
        return tuple(coordinates[axis] for axis in self.along(REPLICAS))

    @property
    def parts(self) -> set[tuple[int, ...]]:
        """Return the identifiers of all parts into which the training state is cut."""
        cuts = (range(size) for axis, size in self.sizes if axis_named(axis).cuts_state)
        return set(itertools.product(*cuts))


def axis_named(name: str) -> Axis:
    """Return the properties of the axis `name`. On an axis that is not in `AXES`, all ranks hold
    the same state and see the same tokens."""
    return AXES.get(name, UNLISTED)


def training_grid(
    data: int = 1,
    shards: int = 1,
    context: int = 1,
    expert: int = 1,
    *,
    tensor: int = 1,
    whole_experts: bool = False,
    **sizes: int,
) -> Grid:
    """Return a grid with all axes of `AXES`, in their order. `sizes` has the sizes of further axes
    by name; axes without a given size have size 1.

    The ranks with the same layers are divided into groups of `expert` neighbours, and the ranks of
    such a group have different experts. A group takes ranks along the context axis first. It takes
    ranks along the data axis only if it has more ranks than the context axis. If `whole_experts` is
    True, the `tensor` ranks do not divide experts, and a group takes ranks along the tensor axis
    first, then along the context axis and the data axis. In the same way, the ranks with the same
    experts are divided into groups of `shards` neighbours, which shard the state. Raises ValueError
    for a name that is not in `AXES`, and if such groups cannot be formed.
    """
    unknown = sizes.keys() - AXES.keys()
    if unknown:
        raise ValueError(f'"{min(unknown)}" is not an axis: {", ".join(AXES)}')
    near = math.gcd(expert, tensor) if whole_experts else 1
    if near < min(tensor, expert) and whole_experts:
        raise ValueError(f"{expert} groups of experts do not divide {tensor} tensor ranks")
    context_expert, data_expert = _dealt(expert // near, data, context, "groups of experts")
    data, context = data // data_expert, context // context_expert
    context_shard, data_shard = _dealt(shards, data, context, "shards")
    named = {
        "tensor_expert": near,
        "tensor_slice": tensor // near,
        "context_expert": context_expert,
        "context_shard": context_shard,
        "context_replicate": context // context_shard,
        "data_expert": data_expert,
        "shard": data_shard,
        "replicate": data // data_shard,
        **sizes,
    }
    return Grid({axis: named.get(axis, 1) for axis in AXES})


def _dealt(size: int, data: int, context: int, what: str) -> tuple[int, int]:
    """Divide the ranks of a context axis (`context` ranks) and of a data axis (`data` ranks) into
    groups of `size` neighbours. Return the number of ranks of a group along the context axis, and
    along the data axis. Raise ValueError if the ranks cannot be divided into such groups; `what`
    names the groups in the message."""
    of_context = math.gcd(size, context)
    of_data = size // of_context
    if data % of_data or (of_data > 1 and of_context < context):
        ranks = f"{data} data ranks"
        if context > 1:
            ranks += f" of {context} context ranks"
        raise ValueError(f"{size} {what} do not divide {ranks}")
    return of_context, of_data


def grid_of(config: Config) -> Grid:
    """Return the process grid of a run with the configuration `config`."""
    return layout_grid(config.layout)


def layout_grid(layout: Layout) -> Grid:
    """Return the process grid of the layout `layout`."""
    return training_grid(
        layout.data,
        layout.shards,
        layout.context,
        layout.expert,
        tensor=layout.tensor,
        whole_experts=layout.dealing.whole,
        pipeline=layout.pipeline,
    )
