"""Methods that sum the gradients of all replicas before each update: replicas stay equal, to the
bit."""

import itertools
from collections.abc import Callable

import torch
from torch import Tensor

from ptdmpi.comm.communicator import DONE, Communicator, Handle
from ptdmpi.engine.data_parallel.method import DataParallel, Replica
from ptdmpi.engine.data_parallel.overlap import BegunSums
from ptdmpi.model.flat import Unit
from ptdmpi.plan.layout.grid import LOSSES
from ptdmpi.plan.schedule.ops import Op

Begin = Callable[[Tensor, Unit], Handle]


class EarlySums(DataParallel):
    """Sums that are begun within the last backward, where the wire gets on with them meanwhile."""

    by_unit = True

    def __init__(self, replica: Replica, begin: Begin | None) -> None:
        super().__init__(replica)
        self.sums: BegunSums | None = None
        # where this rank's own gradient is asked for, none is summed before all is there
        whole = replica.config.log.gradient_noise_every_steps > 0
        everybody = replica.axes[LOSSES]
        if begin is not None and everybody.overlaps and everybody.size > 1 and not whole:
            self.sums = BegunSums(replica, begin)

    def groups(self, unit: Unit, done: tuple[str, ...] = ()) -> list[Communicator]:
        """Return the groups over which a unit's gradients are summed, one after the other; `done`
        are axes over which they are summed already."""
        axes = self.replica.axes
        without = {*unit.apart, *done}
        if not without:
            return [axes[LOSSES]]
        return [axes[axis] for axis in axes.grid.along(LOSSES) if axis not in without]

    def begin_step(self) -> None:
        """Nothing is under way of a step that was not reduced."""
        if self.sums is not None:
            self.sums.wait()

    def begin(self, op: Op) -> None:
        """Sums may be begun in it."""
        if self.sums is not None:
            self.sums.enter(op)

    def end(self, op: Op) -> None:
        """Sums of its stage are begun, if its gradients are complete."""
        if self.sums is not None:
            self.sums.leave(op)


class AllReduce(EarlySums):
    """The sum over the data axis, in ascending data rank; each rank adds up its microbatches in the
    order of the schedule."""

    def __init__(self, replica: Replica) -> None:
        super().__init__(replica, self._begin)

    def reduce(self) -> None:
        """One sum for all parameters that are summed over the same ranks and stand next to each
        other in the flat buffer; or those that were begun."""
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
    """The sum over the data axis, of which each rank of a shard group gets its part (`zero`): first
    within the group, then over the groups, each in ascending rank. With `zero` = 1 the gradients
    are whole and are reduced unit by unit, here or while the last backward is under way; else that
    was done as they arose."""

    def __init__(self, replica: Replica) -> None:
        portion = replica.buffer.portion
        super().__init__(replica, None if portion.shards_gradients else self._scatter)

    def _scatter(self, gradients: Tensor, unit: Unit) -> Handle:
        return self.replica.buffer.portion.group.reduce_scatter_in_place(gradients)

    def reduce(self) -> None:
        """Afterwards `buffer.reduced` has the sums, and what else stands in the gradients is not
        defined."""
        buffer = self.replica.buffer
        if self.sums is not None:
            self.sums.complete()
        elif not buffer.portion.shards_gradients:
            for unit in buffer.gradient_units:
                whole = buffer.gradients[unit.start : unit.stop]
                self._scatter(whole, unit).wait()
        for unit, part in zip(buffer.gradient_units, buffer.reduced, strict=True):
            for group in self.groups(unit, done=("shard",)):
                group.all_reduce(part)


class TreeSum(DataParallel):
    """The sum over the global batch's microbatches along one fixed binary tree.

    Microbatches are the leaves 0 .. M-1; node (k, j) covers the leaves [j 2^k, (j+1) 2^k) and is
    the sum of its two children, or its only child where the other is empty. Which rank holds which
    leaf changes neither the tree nor, therefore, a bit of the sum. Each stage keeps at most
    log2(m) + 1 partial sums; every data rank's part of the tree is sent to all others.
    """

    def __init__(self, replica: Replica) -> None:
        super().__init__(replica)
        self.leaves = replica.schedule.microbatches * self.data.size
        # a stage's gradients one by one: they are cut out of the flat buffer into one leaf
        self.views = {
            number: [weight.main_grad for _, weight in stage.trained_parameters()]
            for number, stage in replica.stages.items()
            if stage.trained_parameters()
        }
        self._nodes: dict[int, dict[tuple[int, int], Tensor]] = {
            number: {} for number in self.views
        }

    def begin_step(self) -> None:
        """No node is left of a step that was not reduced."""
        for nodes in self._nodes.values():
            nodes.clear()

    def leaf(self, stage: int, microbatch: int) -> None:
        """Take the gradient of one microbatch out of the buffer, into the stage's tree."""
        if stage not in self.views:  # nothing of it trains
            return
        leaf = self.data.rank * self.replica.schedule.microbatches + microbatch
        # a copy of its own: a node of the tree lives on while the buffer takes the next leaf
        value = torch.cat([view.flatten() for view in self.views[stage]])
        for view in self.views[stage]:
            view.zero_()  # the next microbatch is a leaf of its own
        self._merge(self._nodes[stage], (0, leaf), value)

    def reduce(self) -> None:
        """Join the data ranks' parts of the tree and put its root into the buffer."""
        for stage, nodes in self._nodes.items():
            mine = dict(nodes)
            nodes.clear()
            # in the order of ranks and nodes that all of them know, so that broadcasts match
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
        """Add a node and climb while its sibling is there, or can never be."""
        level, index = key
        while (1 << level) < self.leaves:
            sibling = index ^ 1
            if (sibling << level) < self.leaves:
                if (level, sibling) not in nodes:
                    break
                other = nodes.pop((level, sibling))
                # the left child first: which of the two came first depends on the layout
                value = other.add_(value) if sibling < index else value.add_(other)
            level = level + 1
            index = index // 2
        nodes[level, index] = value
