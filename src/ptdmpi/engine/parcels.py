"""Parts of matrices on their way between the ranks of a shard group: to whoever makes the matrix
orthogonal (`ptdmpi.plan.shape.dealt`), and its update back."""

from collections.abc import Mapping

import torch
from torch import Tensor

from ptdmpi.comm.exchange import exchange
from ptdmpi.model.buffer import ParameterBuffer
from ptdmpi.model.flat import OwnPart
from ptdmpi.plan.shape.dealt import owners


class Parcels:
    """Where parts of matrices stand in what ranks of a shard group tell each other, all of it one
    message each way. Where nothing is sharded each rank owns its matrices, and nothing travels.

    `away`: of matrices that another rank owns this rank's part, by name, in what goes there;
    `coming`: of matrices of this rank the parts of others, in what comes from there. The `unit` of
    either is the other rank's number.
    """

    def __init__(self, buffer: ParameterBuffer, costs: Mapping[str, int]) -> None:
        """`costs`: what each matrix of the flat order, whoever holds it, takes to be made
        orthogonal."""
        portion = buffer.portion
        self.group = portion.group
        here = portion.group.rank if portion.shards > 1 else 0
        self.device = buffer.device
        self.away: dict[str, OwnPart] = {}
        self.coming: dict[str, list[OwnPart]] = {}
        # elements of what goes to, and comes from, each rank
        self._given = [0] * portion.shards
        self._taken = [0] * portion.shards
        entries = [buffer.entries[name] for name in costs]
        held = [buffer.slices(entry) for entry in entries]
        owned = owners(zip(held, costs.values(), strict=True))
        for entry, some, owner in zip(entries, held, owned, strict=True):
            for shard, begin, end in some:
                if owner == here != shard:
                    part = OwnPart(entry, begin, end, shard, self._taken[shard])
                    self.coming.setdefault(entry.name, []).append(part)
                    self._taken[shard] += part.length
                elif shard == here != owner:
                    self.away[entry.name] = OwnPart(entry, begin, end, owner, self._given[owner])
                    self._given[owner] += end - begin

    def room(self, dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
        """(what goes to each rank, what comes from it), to be filled."""
        sizes = (self._given, self._taken)
        given, taken = (torch.empty(sum(s), dtype=dtype, device=self.device) for s in sizes)
        return list(given.split(self._given)), list(taken.split(self._taken))

    def travel(self, leaving: list[Tensor], arriving: list[Tensor]) -> None:
        """Send each rank its tensor, and fill those of what comes; all ranks of the group call
        it."""
        if any(self._given) or any(self._taken):
            exchange(self.group, leaving, arriving)
