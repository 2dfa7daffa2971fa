"""From each rank's sums of gradients to the gradient of the global batch: reduction and norm."""

from collections.abc import Mapping

import torch
from torch import Tensor

from ptdmpi.comm.communicator import Communicator
from ptdmpi.comm.world import Axes
from ptdmpi.model.parameters import Box, Entry, ParameterBuffer
from ptdmpi.model.stage import TIED_NAME, Stage
from ptdmpi.plan.layout.grid import ENDS
from ptdmpi.plan.schedule.ops import Op
from ptdmpi.plan.schedule.orders import Schedule
from ptdmpi.train.runner import OpHook


class DataSum:
    """The sum over the data axis, in ascending data rank; each rank adds up its microbatches in the
    order of the schedule."""

    def __init__(self, data: Communicator, buffer: ParameterBuffer) -> None:
        self.data = data
        self.buffer = buffer

    def begin_step(self) -> None:
        """A step begins; nothing is kept from one to the next."""

    def reduce(self) -> None:
        self.data.all_reduce(self.buffer.gradients)


class TreeSum(OpHook):
    """The sum over the global batch's microbatches along one fixed binary tree.

    Microbatches are the leaves 0 .. M-1; node (k, j) covers the leaves [j 2^k, (j+1) 2^k) and is
    the sum of its two children, or its only child where the other is empty. Which rank holds which
    leaf changes neither the tree nor, therefore, a bit of the sum. Each stage keeps at most
    log2(m) + 1 partial sums; every data rank's part of the tree is sent to all others.
    """

    def __init__(self, data: Communicator, stages: Mapping[int, Stage], schedule: Schedule) -> None:
        self.data = data
        self.schedule = schedule
        self.leaves = schedule.microbatches * data.size
        self.views = {
            number: [weight.main_grad for _, weight in stage.named_logical_parameters()]
            for number, stage in stages.items()
        }
        self._nodes: dict[int, dict[tuple[int, int], Tensor]] = {number: {} for number in stages}

    def begin_step(self) -> None:
        """Forget what is left of a step that was not reduced."""
        for nodes in self._nodes.values():
            nodes.clear()

    def end(self, op: Op) -> None:
        """A microbatch whose gradient is complete in the buffer becomes a leaf."""
        if self.schedule.completes_gradients(op):
            self.add_leaf(op.stage, op.microbatch)

    def add_leaf(self, stage: int, microbatch: int) -> None:
        """Take the gradient of one microbatch out of the buffer, into the stage's tree."""
        leaf = self.data.rank * self.schedule.microbatches + microbatch
        value = torch.cat([view.flatten() for view in self.views[stage]])
        for view in self.views[stage]:
            view.zero_()
        self._merge(self._nodes[stage], (0, leaf), value)

    def reduce(self) -> None:
        """Join the data ranks' parts of the tree and put its root into the buffer."""
        for stage, nodes in self._nodes.items():
            mine = dict(nodes)
            nodes.clear()
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

    def _merge(self, nodes: dict[tuple[int, int], Tensor], key: tuple[int, int], value: Tensor):
        """Add a node and climb while its sibling is there, or can never be."""
        level, index = key
        while (1 << level) < self.leaves:
            sibling = index ^ 1
            if (sibling << level) < self.leaves:
                if (level, sibling) not in nodes:
                    break
                other = nodes.pop((level, sibling))
                value = other.add_(value) if sibling < index else value.add_(other)
            level, index = level + 1, index // 2
        nodes[level, index] = value


class GradientReduction:
    """Everything between the last backward op of a step and the optimizer.

    Gradients arrive in the buffer already weighted by 1 / valid tokens of the global batch, so
    every reduction is a plain sum.
    """

    def __init__(
        self,
        axes: Axes,
        buffer: ParameterBuffer,
        stages: Mapping[int, Stage],
        data_sum: "DataSum | TreeSum",
    ) -> None:
        self.axes = axes
        self.buffer = buffer
        self.data_sum = data_sum
        sequence_parallel = any(stage.axis.divides_sequence for stage in stages.values())
        entries = buffer.entries.values() if axes["tensor"].size > 1 else ()
        self.shared = [
            entry
            for entry in entries
            if entry.declaration.partial_gradient
            or (entry.declaration.shared_gradient and sequence_parallel)
        ]
        boxes = {entry.name: self._boxes(entry) for entry in entries}
        self.copied = {
            name: held for name, held in boxes.items() if any(box.copies > 1 for box in held)
        }
        tied = any(stage.tied for stage in stages.values())
        self.tied_ends = axes.groups.get(ENDS) if tied else None
        # a tied table on two ranks is one parameter: the first stage's counts
        copy = self.tied_ends is not None and self.tied_ends.rank == 1
        self.counted = sorted(name for name in buffer.entries if not (copy and name == TIED_NAME))
        self.all_names: list[list[str]] = axes["pipeline"].all_gather_object(self.counted)

    def _boxes(self, entry: Entry) -> list[Box]:
        return list(entry.declaration.boxes(self.axes["tensor"].rank, self.axes["tensor"].size))

    def reduce(self) -> None:
        """Sum over data ranks, over tensor ranks (where each saw its positions or its heads only),
        and over the two uses of a tied table."""
        self.data_sum.reduce()
        self._reduce_shared()
        self._reduce_copied()
        self._add_tied()

    def _reduce_shared(self) -> None:
        if self.shared:
            views = [entry.view(self.buffer.gradients) for entry in self.shared]
            packed = torch.cat([view.flatten() for view in views])
            self.axes["tensor"].all_reduce(packed)
            for view, part in zip(views, packed.split([v.numel() for v in views]), strict=True):
                view.copy_(part.view(view.shape))

    def _reduce_copied(self) -> None:
        """What neighbours hold copies of (a key head that serves several ranks' queries): each saw
        its own queries' part of the gradient.

        One all-reduce over the tensor axis of all t / c shares, each rank with zeros where others
        stand. That moves t / c times what a group for each share would, once in a step, and needs
        no further communicators.
        """
        tensor = self.axes["tensor"]
        for name, boxes in self.copied.items():
            gradient = self.buffer.gradient(name)
            for box in boxes:
                if box.copies > 1:
                    local = gradient[box.local]
                    shares = tensor.size // box.copies
                    every = local.new_zeros((shares, *local.shape))
                    mine = every[tensor.rank // box.copies]
                    mine.copy_(local)
                    tensor.all_reduce(every)
                    local.copy_(mine)

    def _add_tied(self) -> None:
        """Embedding + head, in this order in every layout; the two were accumulated apart."""
        if TIED_NAME in self.buffer.second:
            self.buffer.gradient(TIED_NAME).add_(self.buffer.second_gradient(TIED_NAME))
        elif self.tied_ends is not None:
            self.tied_ends.all_reduce(self.buffer.gradient(TIED_NAME))

    def global_norm(self) -> Tensor:
        """The 2-norm of the whole model's gradient, the same bits on every rank.

        It is the norm of the vector of per-parameter norms in alphabetical order of names, as
        torch.nn.utils.clip_grad_norm_ computes it. Replicas and the tied table count once.
        """
        norms = self._counted_norms()
        longest = max(len(names) for names in self.all_names)
        padded = norms.new_zeros(longest)
        padded[: len(norms)] = norms
        rows = self.axes["pipeline"].all_gather(padded).view(-1, longest)
        by_name = {
            name: rows[rank, i]
            for rank, names in enumerate(self.all_names)
            for i, name in enumerate(names)
        }
        return torch.linalg.vector_norm(torch.stack([by_name[name] for name in sorted(by_name)]))

    def _counted_norms(self) -> Tensor:
        """The norm of each counted parameter of this rank, over its whole logical tensor."""
        norms = torch.stack([self._norm_of(name) for name in self.counted])
        if self.axes["tensor"].size == 1:
            return norms
        split = torch.tensor(
            [self.buffer.entries[name].declaration.split is not None for name in self.counted],
            device=norms.device,
        )
        squares = self.axes["tensor"].all_reduce(norms.square())
        return torch.where(split, squares.sqrt(), norms)

    def _norm_of(self, name: str) -> Tensor:
        """Of this rank's part of a gradient; copies count on the first rank that holds them."""
        gradient = self.buffer.gradient(name)
        if name not in self.copied:
            return torch.linalg.vector_norm(gradient)
        squares = [gradient[box.local].square().sum() for box in self.copied[name] if box.counts]
        return sum(squares, gradient.new_zeros(())).sqrt()
