"""The exchange of parts of matrices between the ranks of a shard group (the ranks among which the
state is sharded), for Muon. Each rank sends its part of a matrix to the owner, which is the rank
that orthogonalizes the matrix (`ptdmpi.plan.shape.dealt`), and receives its part of the update from
the owner."""

from collections.abc import Mapping

import torch
from torch import Tensor

from ptdmpi.engine.exchange import exchange
from ptdmpi.model.buffer import ParameterBuffer
from ptdmpi.model.flat import OwnPart
from ptdmpi.plan.shape.dealt import owners


class Parcels:
    """The layout of the messages in which the ranks of a shard group exchange parts of matrices.
    Each pair of ranks exchanges one message in each direction. If the state is not sharded, each
    rank owns all its matrices, and no message is sent.

    `away` is for matrices that other ranks own. It maps the name of a matrix to the position of
    this rank's part in the message to the owner. `coming` is for matrices that this rank owns. It
    maps the name of a matrix to the positions of the other ranks' parts in the messages from these
    ranks. Each position is an `OwnPart`, in which `unit` is the number of the other rank instead of
    the number of a shard unit.
    """

    def __init__(self, buffer: ParameterBuffer, costs: Mapping[str, int]) -> None:
        """Compute the positions of the parts in the messages. `costs` maps the name of each matrix
        of the shard group to the cost of orthogonalizing this matrix."""
        portion = buffer.portion
        self.group = portion.group
        here = portion.group.rank if portion.shards > 1 else 0
        self.device = buffer.device
        self.away: dict[str, OwnPart] = {}
        self.coming: dict[str, list[OwnPart]] = {}
        # the number of elements sent to, and received from, each rank
        self._given = [0] * portion.shards
        self._taken = [0] * portion.shards
        entries = [buffer.entries[name] for name in costs]
        held = [buffer.slices(entry) for entry in entries]
        owned = owners(zip(held, costs.values(), strict=True))
        for entry, some, owner in zip(entries, held, owned, strict=True):
            for shard, begin, end in some:
                if owner == here != shard:
                    part = OwnPart(
                        entry=entry, begin=begin, end=end, unit=shard, offset=self._taken[shard]
                    )
                    self.coming.setdefault(entry.name, []).append(part)
                    self._taken[shard] += part.length
                elif shard == here != owner:
                    self.away[entry.name] = OwnPart(
                        entry=entry, begin=begin, end=end, unit=owner, offset=self._given[owner]
                    )
                    self._given[owner] += end - begin

    def room(self, dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
        """Return empty tensors for the messages: one tensor for the message to each rank, and one
        for the message from each rank."""
        sizes = (self._given, self._taken)
        given, taken = (torch.empty(sum(s), dtype=dtype, device=self.device) for s in sizes)
        return list(given.split(self._given)), list(taken.split(self._taken))

    def travel(self, leaving: list[Tensor], arriving: list[Tensor]) -> None:
        """Send the message `leaving[k]` to each rank k, and receive `arriving[k]` from rank k. All
        ranks of the shard group call this method."""
        if any(self._given) or any(self._taken):
            exchange(self.group, leaving, arriving)
