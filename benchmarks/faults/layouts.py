"""The layouts of tortured runs, what kinds they are of, and how they are dealt to trials."""

import random
from collections.abc import Collection, Sequence
from typing import NamedTuple

from benchmarks.faults.training import BASE, Way

# Of every layout exactly one of the first four, by what `parallel.zero` says; `groups` that hold
# copies of the shards, an optimizer whose state stands in a file, and adapters beside a frozen
# model come on top.
KINDS = ("whole", "zero-1", "zero-2", "zero-3", "groups", "offloaded", "adapted")
ADAPTED = ("adapt.method=lora", "adapt.dropout=0.1", f"adapt.base={BASE}")
KEYS = {"t": "tensor", "p": "pipeline"}


def layout(words: str, ranks: int, options: tuple[str, ...] = ()) -> Way:
    """A layout in short words, such as `p=2,zero=3`: t and p, and keys of `[parallel]`.

    The ranks that these leave are the data axis; a `d` in the words says so to the reader. `lora`
    is the rank of adapters over the model that `training.require_base` makes.
    """
    pairs = dict(word.split("=") for word in words.split(","))
    pairs.pop("d", None)
    lora = pairs.pop("lora", None)
    settings = [f"parallel.{KEYS.get(key, key)}={value}" for key, value in pairs.items()]
    if lora is not None:
        settings += [f"adapt.rank={lora}", *ADAPTED]
    return Way(words, ranks, tuple(settings), options)


def kinds_of(way: Way) -> tuple[str, ...]:
    """Which of KINDS a layout is of."""
    values = dict(setting.split("=") for setting in way.settings)
    zero = values.get("parallel.zero", "0")
    found = ["whole" if zero == "0" else f"zero-{zero}"]
    if "parallel.shard_group" in values:
        found.append("groups")
    if "parallel.offload" in values:
        found.append("offloaded")
    if "adapt.method" in values:
        found.append("adapted")
    return tuple(found)


class Weighted(NamedTuple):
    """A layout, and how many cards of it are in a deck."""

    cards: int
    way: Way


# Four ranks on few cores are slow, and therefore rarer.
LAYOUTS = (
    Weighted(3, layout("p=2", 2)),
    Weighted(3, layout("d=2", 2)),
    Weighted(1, layout("t=2,d=2", 4)),
    Weighted(1, layout("p=2,offload=disk", 2)),
    Weighted(2, layout("zero=1", 2)),
    Weighted(2, layout("zero=2", 2)),
    Weighted(2, layout("zero=3", 2)),
    Weighted(1, layout("zero=1,shard_group=2", 4)),
    Weighted(1, layout("zero=2,shard_group=2", 4)),
    Weighted(1, layout("zero=1,offload=disk", 2)),
    Weighted(1, layout("zero=3,offload=disk", 2)),
    Weighted(1, layout("t=2,zero=2,offload=disk", 4)),
    Weighted(1, layout("p=2,zero=3", 4)),
    Weighted(1, layout("zero=3,shard_group=2,offload=disk", 4)),
    Weighted(1, layout("zero=3,lora=2", 2)),
)
# No file system becomes read-only while a file in it is open for writing: the optimizer's is.
REMOUNTED = tuple(one for one in LAYOUTS if "offloaded" not in kinds_of(one.way))
ULFM = ("--with-ft", "ulfm")
# Bits are compared after d has changed, which `run.reproducible` allows for zero 0 and 1.
SHRINKING = (
    Weighted(1, layout("d=2", 2, ULFM)),
    Weighted(1, layout("d=4", 4, ULFM)),
    Weighted(1, layout("p=2,d=2", 4, ULFM)),
    Weighted(1, layout("zero=1", 4, ULFM)),
    Weighted(1, layout("zero=1,shard_group=2", 4, ULFM)),
    Weighted(1, layout("zero=1,offload=disk", 4, ULFM)),
    Weighted(1, layout("d=2,lora=2", 2, ULFM)),
)


class Deck:
    """Layouts in random order: all cards are dealt before one comes again, so that a few dozen
    trials meet every layout."""

    def __init__(
        self, source: random.Random, layouts: Sequence[Weighted], kinds: Collection[str] = KINDS
    ) -> None:
        """Only layouts that are of one of `kinds`."""
        self.random = source
        self.cards = [
            way for cards, way in layouts for _ in range(cards) if {*kinds} & {*kinds_of(way)}
        ]
        self._left: list[Way] = []

    def deal(self) -> Way:
        """Raises IndexError where there is no card."""
        if not self._left:
            self._left = self.random.sample(self.cards, len(self.cards))
        return self._left.pop()
