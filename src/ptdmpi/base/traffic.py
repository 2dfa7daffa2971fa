"""The number of bytes that a rank sends, for each kind of message: counted while it runs, or
computed by closed forms.

The counts and the closed forms use one convention for bytes, which does not depend on the algorithm
or the transport. For a collective on x bytes of tensors, it counts the bytes that each of n ranks
must send on average (Thakur et al. 2005, section 4). Rajbhandari et al. 2020 (arXiv 1910.02054,
section 7) count in the same way for large n: 2 x for an all-reduce.

    all_reduce      2 x (n - 1) / n     each rank brings x bytes
    all_gather        x (n - 1) / n     x are gathered on each rank
    reduce_scatter    x (n - 1) / n     each rank brings x bytes
    all_to_all        x                 counted where it is sent, without the rank's own part of it
    broadcast         x                 counted on every rank of the group: each passes it on
    send              x                 counted where it is sent
    neighbours        x                 counted where it is sent, once for each who receives it

Only tensors that are sent through a transport are counted, not small objects, votes, heartbeats and
checkpoints.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

# For each collective, how many times its bytes leave each rank; the rank's own n-th part is not
# counted.
PASSES = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}
KINDS = (*PASSES, "all_to_all", "broadcast", "send", "neighbours")


def _none() -> dict[str, int]:
    return dict.fromkeys(KINDS, 0)


@dataclass
class Tally:
    """The messages of one rank in a group of `ranks`, by kind: their number, and the bytes x of the
    convention above. The number and the bytes are integers, so that sums of them are exact."""

    ranks: int
    messages: dict[str, int] = field(default_factory=_none)
    whole_bytes: dict[str, int] = field(default_factory=_none)

    def add(self, kind: str, size: int, messages: int = 1) -> None:
        """Count `messages` of `kind` about `size` bytes each. Raises KeyError for another kind."""
        self.messages[kind] += messages
        self.whole_bytes[kind] += messages * size

    def join(self, other: "Tally") -> None:
        """Count the messages of `other`, a tally of the same ranks, too."""
        for kind, n in other.messages.items():
            self.messages[kind] += n
            self.whole_bytes[kind] += other.whole_bytes[kind]

    @property
    def sent_bytes(self) -> dict[str, int]:
        """Return kind of message -> bytes that this rank sends, by the convention of this module,
        rounded down.
        """
        n = self.ranks
        return {
            kind: PASSES[kind] * size * (n - 1) // n if kind in PASSES else size
            for kind, size in self.whole_bytes.items()
        }

    def copy(self) -> "Tally":
        """Return a copy of the counts."""
        return Tally(self.ranks, dict(self.messages), dict(self.whole_bytes))

    def since(self, earlier: "Tally") -> "Tally":
        """Return the messages since this tally was equal to `earlier`."""
        return Tally(
            self.ranks,
            {kind: n - earlier.messages[kind] for kind, n in self.messages.items()},
            {kind: n - earlier.whole_bytes[kind] for kind, n in self.whole_bytes.items()},
        )


@dataclass(frozen=True)
class Traffic:
    """The tallies of one rank, by the name of the group: "tensor", "data", "pipeline", "ends"."""

    tallies: Mapping[str, Tally] = field(default_factory=dict)

    @property
    def sent_bytes(self) -> dict[str, dict[str, int]]:
        """Return group -> kind -> bytes that this rank sends, without empty entries."""
        return _found({group: tally.sent_bytes for group, tally in self.tallies.items()})

    @property
    def messages(self) -> dict[str, dict[str, int]]:
        """Return group -> kind -> number of messages, without empty entries."""
        return _found({group: tally.messages for group, tally in self.tallies.items()})

    @property
    def by_kind(self) -> dict[str, dict[str, dict[str, int]]]:
        """Return group -> kind -> {"messages": their number, "bytes": those that this rank sends},
        without empty entries."""
        sent = self.sent_bytes
        return {
            group: {
                kind: {"messages": count, "bytes": sent.get(group, {}).get(kind, 0)}
                for kind, count in kinds.items()
            }
            for group, kinds in self.messages.items()
        }

    def since(self, earlier: "Traffic") -> "Traffic":
        """Return the messages since this traffic was equal to `earlier`."""
        tallies = self.tallies.items()
        return Traffic({group: tally.since(earlier.tallies[group]) for group, tally in tallies})


def _found(numbers: Mapping[str, Mapping[str, int]]) -> dict[str, dict[str, int]]:
    present = {group: {kind: n for kind, n in of.items() if n} for group, of in numbers.items()}
    return {group: of for group, of in present.items() if of}
