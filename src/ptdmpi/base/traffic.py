"""The number of bytes that a rank sends, for each kind of message: counted during a run, or
computed by closed formulas.

Counted and computed bytes follow the same convention. The convention does not depend on the
transport, or on the algorithm of a collective. For a collective on x bytes of tensors, the
convention counts the bytes that each of n ranks must send on average (Thakur et al. 2005, section
4). For large n, an all-reduce counts almost 2 x bytes, as in Rajbhandari et al. 2020 (arXiv
1910.02054, section 7).

    all_reduce      2 x (n - 1) / n     each rank has x bytes before the call
    all_gather        x (n - 1) / n     each rank has x bytes after the call
    reduce_scatter    x (n - 1) / n     each rank has x bytes before the call
    all_to_all        x                 counted on the sender, without the part for the rank itself
    broadcast         x                 counted on every rank of the group
    send              x                 counted on the sender
    neighbours        x                 counted on the sender, once for each receiver

Only tensors that are sent through a transport (a library that sends messages) are counted. The
following messages are not counted: small Python objects, checkpoints, votes (by which the ranks
agree whether a stop or save was requested), and the reports by which rank 0 monitors all ranks.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

# For these collectives, f x (n - 1) / n bytes are counted. The table has the factor f of each
# collective.
PASSES = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}
KINDS = (*PASSES, "all_to_all", "broadcast", "send", "neighbours")


def _none() -> dict[str, int]:
    return dict.fromkeys(KINDS, 0)


@dataclass
class Tally:
    """The messages that one rank sends in a group of `ranks` ranks. For each kind of message,
    `messages` has the number of messages, and `whole_bytes` has the sum of their sizes x in bytes
    (x is defined in the module docstring). All numbers are integers, so sums are exact."""

    ranks: int
    messages: dict[str, int] = field(default_factory=_none)
    whole_bytes: dict[str, int] = field(default_factory=_none)

    def add(self, kind: str, size: int, messages: int = 1) -> None:
        """Count `messages` messages of the kind `kind`, each for tensors of `size` bytes. Raises
        KeyError for an unknown kind."""
        self.messages[kind] += messages
        self.whole_bytes[kind] += messages * size

    def join(self, other: "Tally") -> None:
        """Add the counts of the tally `other` to this tally. The groups of both tallies must have
        the same number of ranks."""
        for kind, n in other.messages.items():
            self.messages[kind] += n
            self.whole_bytes[kind] += other.whole_bytes[kind]

    @property
    def sent_bytes(self) -> dict[str, int]:
        """Return the bytes that this rank sends, by kind of message. The bytes are computed by the
        convention of this module, and are rounded down to integers.
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
        """Return the counts of this tally minus the counts of `earlier`, an older copy of this
        tally."""
        return Tally(
            self.ranks,
            {kind: n - earlier.messages[kind] for kind, n in self.messages.items()},
            {kind: n - earlier.whole_bytes[kind] for kind, n in self.whole_bytes.items()},
        )


@dataclass(frozen=True)
class Traffic:
    """The message counts (`Tally`) of one rank in each of its groups. The keys of `tallies` are the
    names of the groups, such as "tensor", "data" and "pipeline".
    """

    tallies: Mapping[str, Tally] = field(default_factory=dict)

    @property
    def sent_bytes(self) -> dict[str, dict[str, int]]:
        """Return a table group -> kind -> bytes that this rank sends. Entries with 0 bytes are left
        out."""
        return _found({group: tally.sent_bytes for group, tally in self.tallies.items()})

    @property
    def messages(self) -> dict[str, dict[str, int]]:
        """Return a table group -> kind -> number of messages. Entries with 0 messages are left
        out."""
        return _found({group: tally.messages for group, tally in self.tallies.items()})

    @property
    def by_kind(self) -> dict[str, dict[str, dict[str, int]]]:
        """Return a table group -> kind -> {"messages": number of messages, "bytes": bytes that this
        rank sends}. Entries with 0 messages are left out."""
        sent = self.sent_bytes
        return {
            group: {
                kind: {"messages": count, "bytes": sent.get(group, {}).get(kind, 0)}
                for kind, count in kinds.items()
            }
            for group, kinds in self.messages.items()
        }

    def since(self, earlier: "Traffic") -> "Traffic":
        """Return the counts of this object minus the counts of `earlier`, an older copy of this
        object."""
        tallies = self.tallies.items()
        return Traffic({group: tally.since(earlier.tallies[group]) for group, tally in tallies})


def _found(numbers: Mapping[str, Mapping[str, int]]) -> dict[str, dict[str, int]]:
    present = {group: {kind: n for kind, n in of.items() if n} for group, of in numbers.items()}
    return {group: of for group, of in present.items() if of}
