"""Detection of silent corruption by a comparison of hashes. Silent corruption means that the state
changes although no code writes to it.

Memory and arithmetic units occasionally fail without notice (Dixit et al. 2021, arXiv 2102.11245).
Before every N-th update, ranks that should have the same values compare hashes of these values. If
three or more ranks should have the same values, the values of the majority are assumed to be right.
If there are only two such ranks and their values differ, it is unknown which rank is right. Each
rank also compares its hashes with the hashes that it computed after its previous update. This
second comparison needs no replicas, and shows on which rank the values have changed. Hashes are
compared late in a step: after the step has used the state, and before the update replaces it. A
change at any time since the last update is therefore found.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ptdmpi.comm.world import Axes
from ptdmpi.model.state import Resident, State

COLUMNS = 512  # a row of 512 words of 8 bytes has 4 KiB, the size of a memory page.
# Both factors of the hash are odd, so that multiplying by them loses no bit of a word. STRIDE is
# the golden ratio in 64 bits (Knuth, The Art of Computer Programming, volume 3, section 6.4). MIX
# is the multiplier of SplitMix (Steele et al. 2014).
STRIDE, MIX = 0x9E3779B97F4A7C15 - 2**64, 0xBF58476D1CE4E5B9 - 2**64

Members = tuple[int, ...]  # ranks that should have the same values, in ascending order


@dataclass(frozen=True)
class Fault:
    """A tensor of the state with wrong values: its `kind` and `name`, and the `ranks` whose values
    may be wrong. `others` are the ranks of the majority, whose values agree; `others` is empty if
    there is no majority. `changed` is True if the hash of a rank shows that the rank's values have
    changed since the last update."""

    kind: str
    name: str
    ranks: Members
    others: Members = ()
    changed: bool = False

    def text(self, name: Callable[[int], str]) -> str:
        """Return a text that describes the fault; `name(rank)` is the name of a rank in
        messages."""
        ranks = ", ".join(map(name, self.ranks))
        what = f"{self.kind} of {self.name}"
        if self.changed:
            return f"{what} on {ranks} changed between an update and the next one"
        if self.others:
            return f"{what} on {ranks} differs from that on {', '.join(map(name, self.others))}"
        return f"{what} differs on {ranks}, and it is unknown which is right"


class CorruptState(RuntimeError):
    """An error: the state of a run is corrupt. All ranks raise `CorruptState`, with the faults that
    any rank has found."""

    def __init__(self, faults: Sequence[Fault]) -> None:
        super().__init__("; ".join(fault.text("rank {}".format) for fault in faults))
        self.faults = faults


class Hashed(NamedTuple):
    """The hash of a tensor of the state on one rank, and the ranks that should have the same
    values."""

    kind: str
    name: str
    ranks: Members
    value: int


class Verification:
    """The comparison of the state's hashes before every N-th update, where N is `every`. If `every`
    is 0, nothing is compared.

    Every rank calls every method. Under some data-parallel methods replicas may differ; then ranks
    of different replicas are not compared. If ranks of one replica have copies of the same tensor,
    these copies are always compared.
    """

    def __init__(self, every: int, state: State, axes: Axes) -> None:
        self.every = every
        self.state = state
        self.axes = axes
        self._known: list[int] | None = None  # the hashes that were computed after the last update
        # (kind, name) of tensors that had changed before the reduction of gradients
        self._changed: list[tuple[str, str]] = []

    def before_reduction(self, step: int) -> None:
        """If step + 1 is a multiple of `every`, check the tensors that the reduction of gradients
        will change: compare this rank's hashes of these tensors with the hashes after the last
        update. `before_update` reports the differences. Steps count from 0."""
        self._changed = []
        if self._known is not None and (step + 1) % self.every == 0:
            known = self._known
            held = self._residents()
            numbers = [number for number, resident in enumerate(held) if resident.early]
            present = hashes([held[number] for number in numbers])
            self.state.let_go()
            self._changed = [
                (held[number].kind, held[number].name)
                for number, now in zip(numbers, present, strict=True)
                if now != known[number]
            ]

    def before_update(self, step: int) -> None:
        """Compare the hashes before the update of step `step` (from 0), if step + 1 is a multiple
        of `every`. Raise CorruptState on every rank if hashes differ."""
        if self.every and (step + 1) % self.every == 0:
            self._verify(reduced=True)

    def after_update(self, step: int) -> None:
        """Compute and store the hashes after the update of step `step`, if the next step compares
        hashes."""
        self._known = None
        if self.every and (step + 2) % self.every == 0:
            self._known = hashes(self._residents())
            self.state.let_go()

    def before_save(self) -> None:
        """Compare the hashes before a checkpoint is saved, if `every` is not 0. Raise CorruptState
        on every rank if hashes differ."""
        if self.every:
            self._verify(reduced=False)

    def _verify(self, *, reduced: bool) -> None:
        """Compare the hashes of the present state, between two steps or before an update. Raise
        CorruptState on every rank if hashes differ. `reduced` is True after a reduction of
        gradients, which has changed some tensors."""
        held = self._residents()
        present = hashes(held)
        self.state.let_go()
        members = [self._members(resident) for resident in held]
        changed = list(self._changed) if reduced else []
        if self._known is not None:
            for resident, now, before in zip(held, present, self._known, strict=True):
                if now != before and not (reduced and resident.early):
                    changed.append((resident.kind, resident.name))
        world = self.axes.world
        mine = (_by_members(members, present), changed)
        every = world.all_gather_object(mine)
        equal = all(_agree(sums, rank, every) for rank, (sums, _) in enumerate(every))
        if equal and not any(more for _, more in every):
            return
        names = [
            Hashed(resident.kind, resident.name, ranks, value)
            for resident, ranks, value in zip(held, members, present, strict=True)
        ]
        differing = list(_differences(world.all_gather_object(names)))
        faults = [
            Fault(kind, name, (rank,), changed=True)
            for rank, (_, more) in enumerate(every)
            for kind, name in more
        ]
        known = {(fault.kind, fault.name) for fault in faults}
        faults += [fault for fault in differing if (fault.kind, fault.name) not in known]
        raise CorruptState(faults)

    def _residents(self) -> list[Resident]:
        return list(self.state.residents())

    def _members(self, held: Resident) -> Members:
        """Return the ranks, including this rank, that should have the same values as this rank in
        the tensor `held`."""
        grid = self.axes.grid
        alike = (axis for axis in grid.axes if axis not in held.cut_by)
        return grid.group(self.axes.world.rank, *alike)


def hashes(held: Iterable[Resident]) -> list[int]:
    """Return a hash of the values of each tensor. All hashes are copied from the device to the host
    in one copy."""
    values = [hash_of(resident.values) for resident in held]
    if not values:
        return []
    result: list[int] = torch.stack(values).tolist()
    return result


def hash_of(values: Tensor) -> Tensor:
    """Return a hash of the bytes of a flat tensor: one int64 on its device, computed in one pass
    over the memory.

    The tensor is treated as a matrix of words with COLUMNS columns. A word has 8 bytes, or 1 byte
    if the size of the tensor in bytes is not a multiple of 8. The words of each column are added up
    modulo 2^64, and the sums are mixed to one number. A single flipped bit changes the sum of one
    column, and so always changes the hash. Several changes stay undetected if they leave all sums
    unchanged, for example if two words of one column are exchanged.
    """
    data = values.view(torch.uint8) if values.nbytes % 8 else values.view(torch.int64)
    whole = data.numel() // COLUMNS * COLUMNS
    sums = data[:whole].view(-1, COLUMNS).sum(0, dtype=torch.int64)
    rest = data[whole:]
    sums[: rest.numel()] += rest
    # multiply the sum of each column by a different factor; the shifts let the high bits change the
    # low bits
    columns = torch.arange(1, 2 * COLUMNS, 2, device=values.device) * STRIDE
    mixed = sums * columns
    mixed = (mixed ^ (mixed >> 29)) * MIX
    return (mixed ^ (mixed >> 32)).sum()


def _by_members(members: Sequence[Members], values: Sequence[int]) -> dict[Members, bytes]:
    """Combine the hashes `values` of this rank's tensors. `members` has a group of ranks for each
    tensor: the ranks that should have the same values in this tensor. Return a dict: group of at
    least two ranks -> combined hash of all tensors that have this group."""
    sums = {ranks: hashlib.blake2b(digest_size=16) for ranks in members if len(ranks) > 1}
    for ranks, value in zip(members, values, strict=True):
        if ranks in sums:
            sums[ranks].update(value.to_bytes(8, "little", signed=True))
    return {ranks: digest.digest() for ranks, digest in sums.items()}


def _agree(
    sums: dict[Members, bytes], rank: int, every: Sequence[tuple[dict[Members, bytes], object]]
) -> bool:
    """Compare the combined hashes `sums` of rank `rank` with the combined hashes of other ranks.
    Rank `rank` is compared with each rank that has a greater number and should have the same
    values. Return True if all compared hashes are equal. `every` has the combined hashes of each
    rank."""
    return all(
        every[other][0].get(ranks) == value
        for ranks, value in sums.items()
        for other in ranks
        if other > rank
    )


def _differences(
    every: Iterable[Sequence[Hashed]],
) -> Iterator[Fault]:
    """Yield a fault for each tensor that differs among the ranks that should have the same values.
    `every` has the hashed tensors of each rank."""
    values: dict[tuple[str, str, Members], dict[int, int]] = {}
    for rank, of_rank in enumerate(every):
        for kind, name, ranks, value in of_rank:
            values.setdefault((kind, name, ranks), {})[rank] = value
    for (kind, name, ranks), by_rank in values.items():
        (usual, count), *others = Counter(by_rank.values()).most_common()
        if not others:
            continue
        if 2 * count > len(ranks):
            agree = tuple(rank for rank in ranks if by_rank[rank] == usual)
            odd = tuple(rank for rank in ranks if rank not in agree)
            yield Fault(kind, name, odd, agree)
        else:
            yield Fault(kind, name, ranks)
