"""The reduction of gradients. The input is the gradients of each rank's own microbatches. The
results are the gradients that the update uses, and their norm.

The reduction is a sequence of several steps (`GradientStep`), each over one group of ranks. The
data-parallel method reduces over the data axis. If each tensor rank has computed only one term of a
gradient, the terms are added over the tensor axis, or over some neighbouring ranks of this axis.
The gradients of the two uses of a tied embedding table, as embedding and as head, are added over
the first and the last pipeline rank.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from ptdmpi.comm.communicator import Communicator
from ptdmpi.comm.world import Axes
from ptdmpi.engine.data_parallel.method import DataParallel
from ptdmpi.model.buffer import ParameterBuffer
from ptdmpi.model.flat import OwnPart
from ptdmpi.model.parameters import Entry, HeldShare
from ptdmpi.model.stage import TIED_NAME, Stage
from ptdmpi.plan.layer.parts import ALIGNMENT
from ptdmpi.plan.layout.grid import ENDS, PARAMETERS


class GradientStep(Protocol):
    """One step of the reduction of gradients, which runs between the last backward op and the
    optimizer. All ranks of a group execute the step together."""

    def reduce(self) -> None:
        """Do this step: change the gradients in the flat buffer."""


class PartialSum:
    """An all-reduce of some gradients over a group: each rank of the group has computed only one
    term of the sum."""

    def __init__(
        self, group: Communicator, buffer: ParameterBuffer, entries: Sequence[Entry]
    ) -> None:
        self.group = group
        self.views = _own_views(buffer, entries)

    def reduce(self) -> None:
        """All-reduce the gradients in one message, because they are many small tensors (gradients
        of norms and biases)."""
        _sum_packed(self.group, self.views)


class CopiedShares:
    """A sum of gradients for parameters that are copied on neighbouring ranks of the tensor axis.
    An example is a key head that serves the queries of several ranks. Each of these ranks computes
    the part of the gradient that comes from its own queries.

    `copied` maps the name of a parameter to its slices on this rank. Other ranks have copies of
    some of these slices.
    """

    def __init__(
        self,
        tensor: Communicator,
        buffer: ParameterBuffer,
        copied: Mapping[str, Sequence[HeldShare]],
    ) -> None:
        self.tensor = tensor
        self.buffer = buffer
        self.copied = copied

    def reduce(self) -> None:
        """Sum the gradients of all copies by one all-reduce over the tensor axis.

        If each slice is on c of the t tensor ranks, there are t / c different slices. The message
        contains all t / c slices, and each rank sends zeros for the slices that it does not have.
        The message is t / c times as long as an all-reduce among c ranks would need, but it is sent
        only once per step and needs no further communicators.
        """
        tensor = self.tensor
        for held in self.buffer.own_parts(self.copied):
            for share in self.copied[held.entry.name]:
                views = [view for view in _parts_of(self.buffer, held, share) if share.copies > 1]
                # All tensor ranks divide their state in the same way among the ranks of their shard
                # groups. So if this rank's shard has no elements of the slice, no tensor rank of
                # this all-reduce has any, and no message is needed.
                if not views:
                    continue
                local = torch.cat([view.flatten() for view in views])
                every = local.new_zeros((tensor.size // share.copies, local.numel()))
                mine = every[tensor.rank // share.copies]
                mine.copy_(local)
                tensor.all_reduce(every)
                _unpack(mine, views)


class TiedTable:
    """The sum of two gradients of a tied table: the gradient of its use as embedding, and the
    gradient of its use as head.

    `ends` is the group of the two ranks that use the table, one as embedding and one as head.
    `ends` is None if both uses are on this rank. The gradients of the two uses are accumulated
    separately, and added in the same order in every layout, so that the sum is bitwise equal in all
    layouts.
    """

    def __init__(self, buffer: ParameterBuffer, ends: Communicator | None) -> None:
        self.buffer = buffer
        self.ends = ends

    def reduce(self) -> None:
        """Add the gradients of the two uses. After the call, both the first and the last stage have
        the sum of the two gradients. If both uses of the table are on this rank, the sum replaces
        the gradient of the first use.
        """
        buffer = self.buffer
        first = _own_views(buffer, [buffer.entries[TIED_NAME]])
        if self.ends is not None:
            for view in first:
                self.ends.all_reduce(view)
            return
        # if the state is sharded, the table is a separate shard unit (a group of parameters that is
        # sharded together), so that the gradients of both uses are sharded equally
        for view, more in zip(first, _own_views(buffer, [buffer.second[TIED_NAME]]), strict=True):
            view.add_(more)


class GradientReduction:
    """All work between the last backward op of a step and the optimizer.

    `steps` are executed in their order. `counted` has the names of the parameters whose norm this
    rank counts. A rank counts all its parameters, except that the last stage does not count its
    copy of a tied table, which the first stage counts.
    """

    def __init__(
        self,
        axes: Axes,
        buffer: ParameterBuffer,
        stages: Mapping[int, Stage],
        policy: DataParallel,
        *,
        borrowed: Collection[str] = (),
    ) -> None:
        """Build the steps of the reduction. `borrowed` has the names of this rank's parameters that
        another pipeline rank counts in norms."""
        self.axes = axes
        self.buffer = buffer
        self.policy = policy
        tied = any(stage.tied for stage in stages.values())
        self.copied = _copied(axes["tensor"], buffer)
        self.steps: list[GradientStep] = list(_partial_sums(axes, buffer, stages))
        if self.copied:
            self.steps.append(CopiedShares(axes["tensor"], buffer, self.copied))
        if tied and TIED_NAME in buffer.second:
            self.steps.append(TiedTable(buffer, None))
        elif tied and TIED_NAME in buffer.entries:
            self.steps.append(TiedTable(buffer, axes[ENDS]))
        self._own_norm_every = policy.replica.config.log.gradient_noise_every_steps
        # A data-parallel method that only sums the replicas' gradients may be the first of these
        # steps. A method that does more is the last step, because it needs the results of all other
        # steps. If the norm of this replica's own gradient is measured, any method is the last
        # step, because this norm is computed just before the last step.
        self.steps.insert(
            0 if policy.linear and not self._own_norm_every else len(self.steps), policy
        )
        # sort the names, because ranks send their norms without the names: the position of a norm
        # shows which parameter it belongs to
        self.counted = sorted(name for name in buffer.entries if name not in borrowed)
        # True for each parameter that the tensor axis does not divide; copied to the device only
        # once
        whole = [buffer.entries[name].declaration.split is None for name in self.counted]
        self._whole = torch.tensor(whole, device=buffer.device)
        all_names: list[list[str]] = axes[PARAMETERS].all_gather_object(self.counted)
        self._longest = max(len(names) for names in all_names)
        # `places` maps the name of each parameter to the index of its norm among the gathered norms
        # of all ranks. If several ranks count a parameter, the norm of the last of these ranks is
        # used.
        places = {
            name: rank * self._longest + i
            for rank, names in enumerate(all_names)
            for i, name in enumerate(names)
        }
        alphabetical = [places[name] for name in sorted(places)]
        self._alphabetical = torch.tensor(alphabetical, dtype=torch.int64, device=buffer.device)

    def reduce(self, step: int | None = None) -> list[Tensor]:
        """Run all steps of the reduction; afterwards the buffer has the gradients for the update.
        If the norm of this data rank's own gradient is measured in training step `step` (from 0),
        return a list with this norm; otherwise return an empty list."""
        *others, last = self.steps
        for gradient_step in others:
            gradient_step.reduce()
        every = self._own_norm_every
        asked = step is not None and every > 0 and (step + 1) % every == 0
        own_norm = [self.global_norm()] if asked else []
        last.reduce()
        return own_norm

    def global_norm(self) -> Tensor:
        """Return the 2-norm of the full model's gradient. The result is bitwise equal on all ranks.

        First the norm of each parameter's gradient is computed, from the norms of the rows of the
        flat buffer. The result is the norm of these norms, in alphabetical order of the parameters'
        names, as in torch.nn.utils.clip_grad_norm_. A parameter with copies on several ranks
        contributes only once.
        """
        norms = self._counted_norms()
        # pad the norms, because ranks have unequal numbers of norms and an all-gather needs equal
        # numbers
        padded = norms.new_zeros(self._longest)
        padded[: len(norms)] = norms
        every = self.axes[PARAMETERS].all_gather(padded)
        return torch.linalg.vector_norm(every[self._alphabetical])

    def _counted_norms(self) -> Tensor:
        """Return the norm of the gradient of each parameter that this rank counts. The norm is over
        the full logical tensor, not only over this rank's slice."""
        rows = self._row_norms()
        if not self.counted:  # the ranks of this tensor group train no parameter
            return self.buffer.gradients.new_zeros(0)
        entries = [self.buffer.entries[name] for name in self.counted]
        parts = [rows[e.start // ALIGNMENT :][: -(-e.elements // ALIGNMENT)] for e in entries]
        norms = torch.stack(torch._foreach_norm(parts))
        if self.axes["tensor"].size == 1:
            return norms
        # If the tensor axis divides a parameter, the squared norms of its slices are added;
        # otherwise this rank's own norm is used. The squared norms of all parameters are sent,
        # although some are not used, so that the message has the same length on all ranks.
        squares = self.axes["tensor"].all_reduce(norms.square())
        return torch.where(self._whole, norms, squares.sqrt())

    def _row_norms(self) -> Tensor:
        """Return the norm of each row of ALIGNMENT elements of the flat buffer. Every parameter
        begins at a new row, so the norm of a row does not depend on the rank that has the row, or
        on the other parameters of this rank."""
        buffer = self.buffer
        parts = [
            torch.linalg.vector_norm(part.view(-1, ALIGNMENT), dim=1)
            for part in buffer.reduced[: len(buffer.units)]
        ]
        for held in buffer.own_parts(self.copied):
            # if several ranks have copies of a slice, only the first of these ranks counts the
            # slice in the norm
            rows = slice(held.offset // ALIGNMENT, -(-(held.offset + held.length) // ALIGNMENT))
            flat = held.view(buffer.reduced)
            padded = flat.new_zeros((rows.stop - rows.start) * ALIGNMENT)
            own = padded[: held.length]
            own.copy_(flat)
            for share in self.copied[held.entry.name]:
                if not share.counts:
                    for view in _views_of(own, held, share):
                        view.zero_()
            norms = torch.linalg.vector_norm(padded.view(-1, ALIGNMENT), dim=1)
            parts[held.unit][rows] = norms
        if not buffer.portion.shards_state or not parts:
            return torch.cat(parts) if parts else buffer.gradients.new_zeros(0)
        # gather the rows of all shards, [shards, rows]; then put the rows in the order of the flat
        # buffer
        every = buffer.portion.group.all_gather(torch.cat(parts)).view(buffer.portion.shards, -1)
        return torch.cat([u.flatten() for u in every.split([len(part) for part in parts], dim=1)])


def _own_views(buffer: ParameterBuffer, entries: Sequence[Entry]) -> list[Tensor]:
    """Return the gradients of some parameters as flat tensors, limited to the elements that this
    rank updates."""
    held = [buffer.own_part(entry) for entry in entries]
    return [part.view(buffer.reduced) for part in held if part is not None]


def _parts_of(buffer: ParameterBuffer, held: OwnPart, share: HeldShare) -> list[Tensor]:
    """Return the gradient of the slice `share` of a parameter as views, limited to the elements
    that this rank updates."""
    return _views_of(held.view(buffer.reduced), held, share)


def _views_of(flat: Tensor, held: OwnPart, share: HeldShare) -> list[Tensor]:
    """Return views of the elements of `flat` that belong to the slice `share` of a parameter.
    `flat` contains the elements of the parameter's part `held`."""
    views = []
    for box, view in held.boxes(flat):
        common = box.overlap(share.local)
        if common is not None:
            views.append(view[common.relative(box).index])
    return views


def _sum_packed(group: Communicator, views: Sequence[Tensor]) -> None:
    """All-reduce the tensors `views` over a group in one message, and write the sums to them."""
    if views:
        packed = torch.cat([view.flatten() for view in views])
        group.all_reduce(packed)
        _unpack(packed, views)


def _unpack(packed: Tensor, views: Sequence[Tensor]) -> None:
    for view, part in zip(views, packed.split([v.numel() for v in views]), strict=True):
        view.copy_(part.view(view.shape))


def _partial_sums(
    axes: Axes, buffer: ParameterBuffer, stages: Mapping[int, Stage]
) -> list[PartialSum]:
    """Return the all-reduces for parameters that several ranks have in full, while each of these
    ranks computes only one term of the gradient. The term of a rank comes from its attention heads,
    from the tokens that it sends to an expert or, under sequence parallelism, from its positions
    (Korthikanti et al. 2022, section 4.2)."""
    divided = any(stage.axis.divides_sequence for stage in stages.values())
    over: dict[str, list[Entry]] = {}
    for entry in buffer.entries.values():
        for group in entry.declaration.partial_over(divided):
            over.setdefault(group, []).append(entry)
    # in a group of one rank, the rank already has the full gradient
    return [
        PartialSum(axes[group], buffer, entries)
        for group, entries in sorted(over.items())
        if axes[group].size > 1
    ]


def _copied(tensor: Communicator, buffer: ParameterBuffer) -> dict[str, list[HeldShare]]:
    """Return the parameters that have the same slice on several ranks of the tensor axis: name of
    the parameter -> its slices on this rank."""
    if tensor.size == 1:
        return {}
    pieces = {
        entry.name: list(entry.declaration.held(tensor.rank, tensor.size))
        for entry in buffer.entries.values()
    }
    return {name: held for name, held in pieces.items() if any(share.copies > 1 for share in held)}
