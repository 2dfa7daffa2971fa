"""Methods that sum the gradients of all replicas before each update, so that replicas stay equal,
bit by bit."""

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
    """A method whose sums begin during the last backward, so that communication overlaps with
    computation."""

    by_unit = True

    def __init__(self, replica: Replica, begin: Begin | None) -> None:
        super().__init__(replica)
        self.sums: BegunSums | None = None
        # if this rank's own gradient is measured, no sum begins before that gradient is complete
        whole = replica.config.log.gradient_noise_every_steps > 0
        everybody = replica.axes[LOSSES]
        if begin is not None and everybody.overlaps and everybody.size > 1 and not whole:
            self.sums = BegunSums(replica, begin)

    def groups(self, unit: Unit, done: tuple[str, ...] = ()) -> list[Communicator]:
        """Return the groups over which the gradients of a shard unit are summed, one after the
        other. `done` are the axes over which they are already summed."""
        axes = self.replica.axes
        without = {*unit.apart, *done}
        if not without:
            return [axes[LOSSES]]
        return [axes[axis] for axis in axes.grid.along(LOSSES) if axis not in without]

    def begin_step(self) -> None:
        """Wait for sums that an earlier step without `reduce` has begun."""
        if self.sums is not None:
            self.sums.wait()

    def begin(self, op: Op) -> None:
        """Note that `op` begins. Sums may begin while the backward runs."""
        if self.sums is not None:
            self.sums.enter(op)

    def end(self, op: Op, microbatch: MicrobatchPass) -> None:
        """Begin the remaining sums of the stage of `op`, if its gradients are complete."""
        if self.sums is not None:
            self.sums.leave(op)


class AllReduce(EarlySums):
    """The sum of gradients over the data axis, in ascending rank order. Each rank adds its
    microbatches in the order of the schedule."""

    def __init__(self, replica: Replica) -> None:
        super().__init__(replica, self._begin)

    def reduce(self) -> None:
        """Sum the gradients over data ranks, or complete the sums that were begun. Neighbouring
        parameters of the flat buffer that are summed over the same ranks share one all-reduce."""
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
    """The sum of gradients over all ranks with different tokens. Each rank of a shard group gets
    only its shard of the sum (`zero`). Gradients are summed first within the shard group, then over
    the groups, each in ascending rank order.

    With `zero` = 1 the gradients are unsharded, and are reduced one shard unit at a time, here or
    during the last backward. With higher `zero` each gradient was reduced when it was computed.
    """

    def __init__(self, replica: Replica) -> None:
        portion = replica.buffer.portion
        super().__init__(replica, None if portion.shards_gradients else self._scatter)

    def _scatter(self, gradients: Tensor, unit: Unit) -> Handle:
        return self.replica.buffer.portion.group.reduce_scatter_in_place(gradients)

    def reduce(self) -> None:
        """Write the sums to `buffer.reduced`. All other elements of the gradients are undefined
        afterwards."""
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
    """The sum of gradients over the microbatches of the global batch along one fixed binary tree.

    Microbatches are the leaves 0 .. M-1. Node (k, j) covers the leaves [j 2^k, (j+1) 2^k) and is
    the sum of its two children, or its only child if the other is empty. The tree, and so every bit
    of the sum, is independent of which rank has which leaves. Each stage stores at most log2(m) + 1
    partial sums; every data rank sends its part of the tree to all others.
    """

    def __init__(self, replica: Replica) -> None:
        super().__init__(replica)
        self.leaves = replica.schedule.microbatches * self.data.size
        # the gradients of each stage, which are copied from the flat buffer into a leaf
        self.views = {
            number: [weight.main_grad for _, weight in stage.trained_parameters()]
            for number, stage in replica.stages.items()
            if stage.trained_parameters()
        }
        self._nodes: dict[int, dict[tuple[int, int], Tensor]] = {
            number: {} for number in self.views
        }

    def begin_step(self) -> None:
        """Remove the nodes that an earlier step without `reduce` has left."""
        for nodes in self._nodes.values():
            nodes.clear()

    def leaf(self, stage: int, microbatch: int) -> None:
        """Move the gradient of one microbatch from the buffer into the tree of its stage."""
        if stage not in self.views:  # no parameter of this stage trains
            return
        leaf = self.data.rank * self.replica.schedule.microbatches + microbatch
        # copy the leaf, because the next leaf overwrites the buffer
        value = torch.cat([view.flatten() for view in self.views[stage]])
        for view in self.views[stage]:
            view.zero_()  # the next microbatch is a separate leaf
        self._merge(self._nodes[stage], (0, leaf), value)

    def reduce(self) -> None:
        """Join the parts of the tree that the data ranks have, and copy its root into the
        buffer."""
        for stage, nodes in self._nodes.items():
            mine = dict(nodes)
            nodes.clear()
            # all ranks visit ranks and nodes in the same order, so that broadcasts match
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
        """Add a node to the tree, and merge it upwards as long as its sibling is present or cannot
        exist."""
        level, index = key
        while (1 << level) < self.leaves:
            sibling = index ^ 1
            if (sibling << level) < self.leaves:
                if (level, sibling) not in nodes:
                    break
                other = nodes.pop((level, sibling))
                # always left child + right child, because their order of arrival depends on the
                # layout
                value = other.add_(value) if sibling < index else value.add_(other)
            level = level + 1
            index = index // 2
        nodes[level, index] = value
