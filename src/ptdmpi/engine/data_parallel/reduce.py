"""Data-parallel methods that sum the gradients of all replicas before each update, so that the
replicas stay bitwise equal. Gradients may be summed one shard unit at a time; a shard unit is a
group of parameters, such as the parameters of a layer (`model.flat`)."""

import itertools
from collections.abc import Callable

import torch
from torch import Tensor

from ptdmpi.comm.communicator import DONE, Communicator, Handle
from ptdmpi.engine.data_parallel.method import DataParallel, Replica
from ptdmpi.engine.data_parallel.overlap import BegunSums
from ptdmpi.model.batch import MicrobatchPass
from ptdmpi.model.flat import Unit
from ptdmpi.plan.layout.grid import LOSSES, SHARD_AXES
from ptdmpi.plan.schedule.ops import Op

Begin = Callable[[Tensor, Unit], Handle]


class EarlySums(DataParallel):
    """The base class of methods that sum gradients over ranks. If the transport (the library that
    sends messages) can overlap communication with computation, the sums begin during the backward
    of the last microbatch."""

    by_unit = True

    def __init__(self, replica: Replica, begin: Begin | None) -> None:
        super().__init__(replica)
        self.sums: BegunSums | None = None
        # if the norm of this rank's own gradient is measured, no sum over ranks may begin before
        # the rank's gradient is complete
        whole = replica.config.log.gradient_noise_every_steps > 0
        everybody = replica.axes[LOSSES]
        if begin is not None and everybody.overlaps and everybody.size > 1 and not whole:
            self.sums = BegunSums(replica, begin)

    def groups(self, unit: Unit, done: tuple[str, ...] = ()) -> list[Communicator]:
        """Return the groups of ranks over which the gradients of a shard unit are summed: first
        over the first group, then over the next. `done` has the axes over which the gradients are
        already summed."""
        axes = self.replica.axes
        without = {*unit.apart, *done}
        if not without:
            return [axes[LOSSES]]
        return [axes[axis] for axis in axes.grid.along(LOSSES) if axis not in without]

    def begin_step(self) -> None:
        """Wait for sums that an earlier step has begun, but has not completed by a call of
        `reduce`."""
        if self.sums is not None:
            self.sums.wait()

    def begin(self, op: Op) -> None:
        """Record that `op` (the forward or the backward of a stage on one microbatch) begins,
        because sums may begin while a backward op runs."""
        if self.sums is not None:
            self.sums.enter(op)

    def end(self, op: Op, microbatch: MicrobatchPass) -> None:
        """If `op` completes the gradients of its stage, begin the sums of this stage that have not
        begun yet."""
        if self.sums is not None:
            self.sums.leave(op)


class AllReduce(EarlySums):
    """A method that sums gradients over all ranks that see different tokens (the group `losses`),
    in ascending order of ranks if the transport is exact (`WireTraits`). Before this sum, each rank
    has added the gradients of its own microbatches in the order of the schedule."""

    def __init__(self, replica: Replica) -> None:
        super().__init__(replica, self._begin)

    def reduce(self) -> None:
        """Sum the gradients over all ranks that see different tokens, or complete the sums that
        were begun during the backward. One all-reduce sums all neighbouring parameters of the flat
        buffer that are summed over the same ranks."""
        if self.sums is not None:
            self.sums.complete()
            return
        buffer = self.replica.buffer
        for _, same in itertools.groupby(buffer.gradient_units, key=lambda unit: unit.apart):
            units = list(same)
            self._begin(buffer.gradients[units[0].start : units[-1].stop], units[0]).wait()

    def _begin(self, gradients: Tensor, unit: Unit) -> Handle:
        handle = DONE
        for group in self.groups(unit):
            handle.wait()
            handle = group.all_reduce_begin(gradients)
        return handle


class Sharded(EarlySums):
    """A method for sharded state (ZeRO) that sums gradients over all ranks that see different
    tokens. A shard group consists of the ranks that divide one copy of the state among them; each
    of these ranks gets only its shard of the sum. Gradients are summed first within the shard
    group, then over the shard groups.

    With ZeRO stage 1 the gradients are not sharded. They are reduced one shard unit at a time, in
    `reduce` or during the backward of the last microbatch. With ZeRO stages 2 and 3, each gradient
    has already been reduced within the shard group when it was computed.
    """

    def __init__(self, replica: Replica) -> None:
        portion = replica.buffer.portion
        super().__init__(replica, None if portion.shards_gradients else self._scatter)

    def _scatter(self, gradients: Tensor, unit: Unit) -> Handle:
        return self.replica.buffer.portion.group.reduce_scatter_in_place(gradients)

    def reduce(self) -> None:
        """Write this rank's shards of the sums to `buffer.reduced`. All other elements of the
        gradients are undefined afterwards."""
        buffer = self.replica.buffer
        if self.sums is not None:
            self.sums.complete()
        elif not buffer.portion.shards_gradients:
            for unit in buffer.gradient_units:
                whole = buffer.gradients[unit.start : unit.stop]
                self._scatter(whole, unit).wait()
        for unit, part in zip(buffer.gradient_units, buffer.reduced, strict=True):
            for group in self.groups(unit, done=SHARD_AXES):
                group.all_reduce(part)


class TreeSum(DataParallel):
    """A method that sums the gradients of the global batch's microbatches along one fixed binary
    tree.

    The gradients of the M microbatches are the leaves 0 .. M-1. Node (k, j) covers the leaves
    [j 2^k, (j+1) 2^k). A node is the sum of its two children, or equal to its left child if there
    is no right child. The tree does not depend on the assignment of microbatches to ranks, so the
    bits of the sum do not depend on it, either.

    A data rank has m microbatches. Before the ranks exchange their nodes, each pipeline stage
    stores at most log2(m) + 1 nodes if m is a power of two, and at most 2 log2(m) + 1 otherwise.
    Then every data rank sends its nodes to all other data ranks.
    """

    def __init__(self, replica: Replica) -> None:
        super().__init__(replica)
        self.leaves = replica.schedule.microbatches * self.data.size
        # for each stage, the gradients in the flat buffer that are copied into a leaf of the tree
        self.views = {
            number: [weight.main_grad for _, weight in stage.trained_parameters()]
            for number, stage in replica.stages.items()
            if stage.trained_parameters()
        }
        self._nodes: dict[int, dict[tuple[int, int], Tensor]] = {
            number: {} for number in self.views
        }

    def begin_step(self) -> None:
        """Remove the tree nodes that an earlier step has left because it did not call `reduce`."""
        for nodes in self._nodes.values():
            nodes.clear()

    def leaf(self, stage: int, microbatch: int) -> None:
        """Move the gradient of one microbatch from the buffer into the tree of its stage."""
        if stage not in self.views:  # if the stage trains no parameter, it has no gradient
            return
        leaf = self.data.rank * self.replica.schedule.microbatches + microbatch
        # copy the gradient, because the gradient of the next microbatch overwrites the buffer
        value = torch.cat([view.flatten() for view in self.views[stage]])
        for view in self.views[stage]:
            view.zero_()  # the gradient of the next microbatch must not be added to this leaf
        self._merge(self._nodes[stage], (0, leaf), value)

    def reduce(self) -> None:
        """Send the tree nodes of each data rank to all data ranks, merge them to one tree, and copy
        the root of the tree, which is the sum of all gradients, into the buffer."""
        for stage, nodes in self._nodes.items():
            mine = dict(nodes)
            nodes.clear()
            # every rank takes part in the broadcasts in the same order: by data rank, then by node
            for rank, keys in enumerate(self.data.all_gather_object(sorted(mine))):
                for key in keys:
                    here = rank == self.data.rank
                    value = mine.pop(key) if here else self._empty(stage)
                    self._merge(nodes, key, self.data.broadcast(value, rank))
            ((_, root),) = nodes.items()
            sizes = [view.numel() for view in self.views[stage]]
            for view, part in zip(self.views[stage], root.split(sizes), strict=True):
                view.copy_(part.view(view.shape))
            nodes.clear()

    def _empty(self, stage: int) -> Tensor:
        views = self.views[stage]
        return views[0].new_empty(sum(view.numel() for view in views))

    def _merge(
        self, nodes: dict[tuple[int, int], Tensor], key: tuple[int, int], value: Tensor
    ) -> None:
        """Add the node `key` (level, index) to the tree. As long as the sibling of the node is in
        the tree, or the node can have no sibling, replace the node by its parent."""
        level, index = key
        while (1 << level) < self.leaves:
            sibling = index ^ 1
            if (sibling << level) < self.leaves:
                if (level, sibling) not in nodes:
                    break
                other = nodes.pop((level, sibling))
                # always add the right child to the left child, because their order of arrival
                # depends on the layout
                value = other.add_(value) if sibling < index else value.add_(other)
            level = level + 1
            index = index // 2
        nodes[level, index] = value
