"""The layouts of the runs into which `torture` injects faults, and the kinds of these layouts. For
each trial `torture` draws a layout from a deck of cards."""

import random
from collections.abc import Collection, Sequence
from typing import NamedTuple

from benchmarks.faults.training import BASE, Way

# Every layout belongs to exactly one of the first four kinds, which depends on `parallel.zero`. A
# layout may also have some of the other kinds: ZeRO shards within groups, an optimizer whose state
# is in a file, and adapters of a frozen model.
KINDS = ("whole", "zero-1", "zero-2", "zero-3", "groups", "offloaded", "adapted")
ADAPTED = ("adapt.method=lora", "adapt.dropout=0.1", f"adapt.base={BASE}")
KEYS = {"t": "tensor", "p": "pipeline"}


def layout(words: str, ranks: int, options: tuple[str, ...] = ()) -> Way:
    """Return a layout that is given by a text such as `p=2,zero=3`, with the sizes t (tensor) and p
    (pipeline), and with keys of `[parallel]`.

    The data axis has the remaining ranks. A size `d` in the text is ignored. The key `lora` in the
    text is the rank of LoRA adapters for the model that `training.require_base` trains. `options`
    are options of mpirun.
    """
    pairs = dict(word.split("=") for word in words.split(","))
    pairs.pop("d", None)
    lora = pairs.pop("lora", None)
    settings = [f"parallel.{KEYS.get(key, key)}={value}" for key, value in pairs.items()]
    if lora is not None:
        settings += [f"adapt.rank={lora}", *ADAPTED]
    return Way(words, ranks, tuple(settings), options)


def kinds_of(way: Way) -> tuple[str, ...]:
    """Return the kinds of layouts, among KINDS, to which a layout belongs."""
    values = dict(setting.split("=") for setting in way.settings)
    zero = values.get("parallel.zero", "0")
    kinds = ["whole" if zero == "0" else f"zero-{zero}"]
    if "parallel.shard_group" in values:
        kinds.append("groups")
    if "parallel.offload" in values:
        kinds.append("offloaded")
    if "adapt.method" in values:
        kinds.append("adapted")
    return tuple(kinds)


class Weighted(NamedTuple):
    """A layout, and its number of cards in a deck. A layout with more cards is drawn more often."""

    cards: int
    way: Way


# Four ranks are slow on few cores, so layouts of four ranks occur less often.
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
# Layouts for trials that make the file system read-only. Layouts whose optimizer keeps its state in
# a file are left out, because a file system cannot become read-only while a file is open for
# writing.
REMOUNTED = tuple(cards for cards in LAYOUTS if "offloaded" not in kinds_of(cards.way))
ULFM = ("--with-ft", "ulfm")
# Layouts of runs that lose a rank and continue with fewer data ranks (`run.on_failure = "shrink"`).
# After the loss of a rank, the results must still be bitwise equal to the results of an undisturbed
# run. With `run.reproducible`, this is possible for the ZeRO stages 0 and 1.
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
    """A deck of cards in random order; each card is a layout. `deal` returns all cards of the deck
    before it returns a card for the second time, so that a few dozen trials contain every
    layout."""

    def __init__(
        self, source: random.Random, layouts: Sequence[Weighted], kinds: Collection[str] = KINDS
    ) -> None:
        """Make a deck of those layouts that belong to at least one of `kinds`."""
        self.random = source
        self.cards = [
            way for cards, way in layouts for _ in range(cards) if {*kinds} & {*kinds_of(way)}
        ]
        self._left: list[Way] = []

    def deal(self) -> Way:
        """Return the layout on the next card. Raises IndexError if no layout belongs to the kinds
        of this deck."""
        if not self._left:
            self._left = self.random.sample(self.cards, len(self.cards))
        return self._left.pop()
