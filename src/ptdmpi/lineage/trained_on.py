"""What a run was trained on: the identity of its tokenizer, its data, and the order of its samples.

A run is a row of stretches, nearly always one. In each, samples come in one order; a new one begins
where the data, the mixture, the seed or the batch was changed on purpose. Samples and tokens are
counted through all of them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol, Self

from ptdmpi.config import Config
from ptdmpi.data.order import Part, SampleOrder, Start
from ptdmpi.data.split import SplitOrder


class Samples(Protocol):
    """A dataset as far as a run is told by it: a directory of shards, or a file of a task."""

    @property
    def tokenizer(self) -> str:
        """The name of its tokenizer."""

    @property
    def tokenizer_sha256(self) -> str:
        """What makes two tokenizers one."""

    @property
    def sha256(self) -> str:
        """What changes with its content."""

    def samples(self, length: int) -> int:
        """How many samples it has, of so many tokens."""


@dataclass(frozen=True)
class Source:
    """One training dataset. `sha256` is over the headers of its shards, `samples` how many it has.

    `key` is its number among all that the run has seen: it names the dataset's permutations and its
    place in records. `drawn`: samples of it that were drawn before the stretch.
    """

    path: str
    sha256: str
    samples: int
    weight: str
    key: int
    drawn: int = 0


@dataclass(frozen=True)
class Stretch:
    """Steps whose samples come in one order; `step` steps, `sample` samples and `tokens` tokens
    were trained before it. `gone`: what was drawn of datasets that it no longer has. `ranks`: to
    how many data ranks sources are dealt, each of which draws from its own; 1: all draw from all.
    """

    step: int
    sample: int
    tokens: int
    seed: int
    global_size: int
    seq_length: int
    sources: tuple[Source, ...]
    gone: tuple[Source, ...] = ()
    ranks: int = 1

    def samples_after(self, step: int) -> int:
        """Samples consumed when `step` steps are done."""
        return self.sample + (step - self.step) * self.global_size

    def tokens_after(self, step: int) -> int:
        """Tokens trained on when `step` steps are done."""
        return self.tokens + (step - self.step) * self.global_size * self.seq_length

    def order(self, epochs: Sequence[Any] = ()) -> SampleOrder:
        """The order of the samples; `epochs`: an upper limit of each dataset, or None. Raises
        InputError as SampleOrder does."""
        limits = list(epochs) or [None] * len(self.sources)
        parts = [
            Part(one.samples, one.weight, limit, one.key, one.drawn)
            for one, limit in zip(self.sources, limits, strict=True)
        ]
        start = Start(self.step, self.sample)
        if self.ranks == 1:
            return SampleOrder(parts, self.seed, start)
        return SplitOrder(
            parts, self.seed, ranks=self.ranks, global_size=self.global_size, start=start
        )

    def drawn(self, order: SampleOrder, step: int) -> list[Source]:
        """Every dataset that the run has seen, by `key`, with what was drawn after `step` steps;
        `order` is that of `order()`."""
        counts = order.counts(self.samples_after(step))
        now = [replace(one, drawn=n) for one, n in zip(self.sources, counts, strict=True)]
        return sorted([*now, *self.gone], key=lambda one: one.key)


@dataclass(frozen=True)
class TrainedOn:
    """What a run was trained on so far, and is trained on next: its tokenizer and its stretches."""

    tokenizer: str
    tokenizer_sha256: str
    stretches: tuple[Stretch, ...]

    @property
    def last(self) -> Stretch:
        return self.stretches[-1]

    def as_json(self) -> dict[str, Any]:
        """For a manifest or a record; `from_json` reads it back."""
        return asdict(self)

    @classmethod
    def from_json(cls, table: Any) -> Self | None:
        """None where it is not there, as in what older versions wrote. Raises ValueError for what
        this program did not write."""
        if table is None:
            return None
        try:
            stretches = tuple(_stretch(one) for one in table["stretches"])
            found = cls(str(table["tokenizer"]), str(table["tokenizer_sha256"]), stretches)
        except (KeyError, TypeError) as error:
            raise ValueError(f"trained_on: {error}") from None
        if not found.stretches:
            raise ValueError("trained_on: no stretch")
        return found


def _stretch(table: Mapping[str, Any]) -> Stretch:
    sources = {
        name: tuple(Source(**one) for one in table.get(name, ())) for name in ("sources", "gone")
    }
    return Stretch(**{**table, **sources})


def begun(config: Config, train: Sequence[Samples]) -> TrainedOn:
    """What a run of this configuration is trained on if it begins now."""
    length = config.model.text_length
    sources = tuple(
        Source(part.path, one.sha256, one.samples(length), str(part.weight), key)
        for key, (part, one) in enumerate(zip(config.data.train, train, strict=True))
    )
    # several sequences may make one sample, which then has the tokens of all of them
    tokens = config.task.sequences * config.model.seq_length
    ranks = config.data_size if config.data.split == "by_rank" else 1
    first = Stretch(0, 0, 0, config.run.seed, config.samples, tokens, sources, ranks=ranks)
    return TrainedOn(train[0].tokenizer, train[0].tokenizer_sha256, (first,))


def synthetic(config: Config, name: str = "synthetic") -> TrainedOn:
    """The identity of a run whose samples are made up, in tests and benchmarks."""
    model, size = config.model, config.batch.global_size
    source = Source(name, "0" * 64, 10**9, "1", 0)
    first = Stretch(0, 0, 0, config.run.seed, size, model.seq_length, (source,))
    return TrainedOn(name, "0" * 64, (first,))


def changed_at(before: TrainedOn, now: TrainedOn, step: int) -> TrainedOn:
    """`before`, and from step `step` (done) on the data, mixture, seed and batch of `now`.

    Samples are numbered on. The mixture's table begins anew; a dataset that was there before (by
    its hash) goes on behind its last draw, so that none of its samples is repeated or left out,
    and a new one begins at its first.
    """
    last, fresh = before.last, now.last
    known = last.drawn(last.order(), step)
    left = list(known)
    sources = []
    for one in fresh.sources:
        same = next((old for old in left if old.sha256 == one.sha256), None)
        if same is not None:
            left.remove(same)
            sources.append(replace(one, key=same.key, drawn=same.drawn))
        else:
            new = sum(source.key >= len(known) for source in sources)
            sources.append(replace(one, key=len(known) + new))
    stretch = replace(
        fresh,
        step=step,
        sample=last.samples_after(step),
        tokens=last.tokens_after(step),
        sources=tuple(sources),
        gone=tuple(left),
    )
    return replace(before, stretches=(*before.stretches, stretch))
