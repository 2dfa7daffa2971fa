"""Data-parallel methods: what the replicas of a model tell each other, and when.

A method is one class with four places to say something: when the gradient of one microbatch is
complete, when those of all are (`reduce`), after the update, and, as `differs`, along which axes
the replicas need not be equal. Norm, skipped steps and checkpoints ask it, and nobody else knows
which method runs. `METHODS` names them.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ptdmpi.comm.world import Axes
from ptdmpi.config import Config
from ptdmpi.engine.runner import OpHook
from ptdmpi.model.buffer import ParameterBuffer
from ptdmpi.model.stage import Stage
from ptdmpi.plan.schedule.ops import Op
from ptdmpi.plan.schedule.orders import Schedule


@dataclass(frozen=True)
class Replica:
    """What a method works on: this rank's place, its parameters and gradients, its stages by
    number, and the schedule of a step."""

    axes: Axes
    buffer: ParameterBuffer
    stages: Mapping[int, Stage]
    schedule: Schedule


class DataParallel(OpHook):
    """A method; by itself each replica trains alone on its own samples.

    `differs`: the axes of the grid along which ranks may hold different values of the same
    parameters. () where all replicas are equal, to the bit, after every step.
    """

    differs: tuple[str, ...] = ()

    def __init__(self, replica: Replica) -> None:
        self.replica = replica
        self.data = replica.axes["data"]

    def begin_step(self) -> None:
        """The gradients are zero and the first op is about to begin. What is left of a step that
        was not reduced, such as one that was only looked at, is to be forgotten."""

    def end(self, op: Op) -> None:
        """Calls `leaf` where the gradient of a microbatch is complete: of a backward that is split
        into several ops, after the last of them."""
        if self.replica.schedule.completes_gradients(op):
            self.leaf(op.stage, op.microbatch)

    def leaf(self, stage: int, microbatch: int) -> None:
        """The gradient of one microbatch (of this data rank's, from 0) is complete in the buffer,
        added to what stands there. More may be added to it once this returns."""

    def reduce(self) -> None:
        """Turn the gradients in the buffer, of this data rank's microbatches, into those that this
        replica updates with. They are weighted by 1 / valid tokens of the global batch already, so
        the gradient of the global batch is their plain sum over data ranks."""

    def after_update(self, step: int) -> None:
        """The masters have had step `step` (from 0) on this replica, or it was skipped by all of
        them. Whoever changes masters here has them followed by the weights: that comes next."""

    def agreed(self, value: float) -> float:
        """What every rank is told of a number that replicas may differ in, such as a norm: the
        greatest. It decides whether a step is skipped, so NaN outweighs all others."""
        if not self.differs:
            return value  # equal already: no message
        values = self.data.all_gather_object(value)
        return math.nan if any(map(math.isnan, values)) else max(values)


class AllReduce(DataParallel):
    """The sum over the data axis, in ascending data rank; each rank adds up its microbatches in the
    order of the schedule."""

    def reduce(self) -> None:
        """One sum for all parameters: they stand in one flat buffer."""
        self.data.all_reduce(self.replica.buffer.gradients)


class Sharded(DataParallel):
    """The sum over the data axis, of which each rank of a shard group gets its part (`zero`): first
    within the group, then over the groups, each in ascending rank. With `zero` = 1 the gradients
    are whole and are reduced here, unit by unit; else that was done as they arose."""

    def reduce(self) -> None:
        """Afterwards `buffer.reduced` has the sums, and what else stands in the gradients is not
        defined."""
        buffer = self.replica.buffer
        if buffer.portion.sharded == 1:
            for unit in buffer.gradient_units:
                whole = buffer.gradients[unit.start : unit.stop]
                buffer.portion.group.reduce_scatter_in_place(whole).wait()
        for part in buffer.reduced:
            self.replica.axes["replicate"].all_reduce(part)


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
            level, index = level + 1, index // 2
        nodes[level, index] = value


METHODS: dict[str, type[DataParallel]] = {
    "all_reduce": AllReduce,
    "sharded": Sharded,
    "tree": TreeSum,
}


def data_parallel(config: Config, replica: Replica) -> DataParallel:
    """The method that a configuration asks for."""
    if config.run.reproducible:
        return METHODS["tree"](replica)
    return METHODS["sharded" if replica.buffer.portion.sharded else "all_reduce"](replica)
