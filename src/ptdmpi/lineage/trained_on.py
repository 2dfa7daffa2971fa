"""The data on which a run was trained: the tokenizer (with a hash), the datasets, and the order of
the samples.

The steps of a run are divided into stretches. Within a stretch, all samples come from one order. A
new stretch begins when a run continues with other data, another mixture, another seed or another
batch size. It also begins when the samples are divided among another number of ranks
(`data.split`). All these changes need the setting `data.change = "from here"`. Nearly all runs have
only one stretch. The counts of samples and tokens start at the beginning of the run, not at the
beginning of a stretch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol, Self

from ptdmpi.config import Config
from ptdmpi.data.order import Part, SampleOrder, Start
from ptdmpi.data.split import SplitOrder


class Samples(Protocol):
    """The interface of a dataset for training: a directory of shards, or a file of a task."""

    @property
    def tokenizer(self) -> str:
        """Return the name of the dataset's tokenizer."""

    @property
    def tokenizer_sha256(self) -> str:
        """Return a hash of the tokenizer. Two datasets with the same tokenizer have the same
        hash."""

    @property
    def sha256(self) -> str:
        """Return a hash of the dataset's content. Datasets with different contents have different
        hashes."""

    def samples(self, length: int) -> int:
        """Return the number of samples of `length` tokens."""


@dataclass(frozen=True)
class Source:
    """One training dataset of a run. `sha256` is a hash of the headers of the dataset's shards, and
    `samples` is the number of samples in the dataset.

    `key` is the index of the dataset among all datasets that the run has seen. The key selects the
    random permutations of the dataset's samples, and identifies the dataset in records. `drawn` is
    the number of the dataset's samples that were used before the `Stretch` that this object belongs
    to.
    """

    path: str
    sha256: str
    samples: int
    weight: str
    key: int
    drawn: int = 0


@dataclass(frozen=True)
class Stretch:
    """Consecutive steps whose samples come from one order of samples (see `SampleOrder`). `step`,
    `sample` and `tokens` are the numbers of steps, samples and tokens that were trained before the
    stretch. `gone` has the datasets that were used only before this stretch; their field `drawn` is
    the number of samples used. If `ranks` is greater than 1, the samples are divided among this
    number of data ranks, and each data rank reads only its own samples. If `ranks` is 1, all data
    ranks read from all samples."""

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
        """Return the number of samples consumed after `step` steps."""
        return self.sample + (step - self.step) * self.global_size

    def tokens_after(self, step: int) -> int:
        """Return the number of tokens trained on after `step` steps."""
        return self.tokens + (step - self.step) * self.global_size * self.seq_length

    def order(self, epochs: Sequence[Any] = ()) -> SampleOrder:
        """Return the order of the samples in this stretch. `epochs` has the maximum number of
        epochs for each dataset; None means that there is no maximum. Raises the same errors as
        `SampleOrder`."""
        limits = list(epochs) or [None] * len(self.sources)
        parts = [
            Part(
                samples=source.samples,
                weight=source.weight,
                epochs=limit,
                key=source.key,
                drawn=source.drawn,
            )
            for source, limit in zip(self.sources, limits, strict=True)
        ]
        start = Start(self.step, self.sample)
        if self.ranks == 1:
            return SampleOrder(parts, self.seed, start)
        return SplitOrder(
            parts, self.seed, ranks=self.ranks, global_size=self.global_size, start=start
        )

    def drawn(self, order: SampleOrder, step: int) -> list[Source]:
        """Return every dataset that the run has seen, in the order of `key`. In each returned
        `Source`, `drawn` is the number of samples that were used after `step` steps. `order` is the
        result of the method `order`."""
        counts = order.counts(self.samples_after(step))
        now = [replace(source, drawn=n) for source, n in zip(self.sources, counts, strict=True)]
        return sorted([*now, *self.gone], key=lambda source: source.key)


@dataclass(frozen=True)
class TrainedOn:
    """The data of all past and future steps of a run: the tokenizer, and the stretches of steps,
    oldest first."""

    tokenizer: str
    tokenizer_sha256: str
    stretches: tuple[Stretch, ...]

    @property
    def last(self) -> Stretch:
        """Return the last stretch, to which the next step of the run belongs."""
        return self.stretches[-1]

    def as_json(self) -> dict[str, Any]:
        """Return this object as JSON, for a manifest or a record. `from_json` reads it."""
        return asdict(self)

    @classmethod
    def from_json(cls, table: Any) -> Self | None:
        """Return the object that `as_json` has converted to the JSON `table`. Return None if
        `table` is None, which happens for files of older versions of this program. Raise ValueError
        for a value that `as_json` cannot have written."""
        if table is None:
            return None
        try:
            stretches = tuple(_stretch(stretch) for stretch in table["stretches"])
            trained_on = cls(str(table["tokenizer"]), str(table["tokenizer_sha256"]), stretches)
        except (KeyError, TypeError) as error:
            raise ValueError(f"trained_on: {error}") from None
        if not trained_on.stretches:
            raise ValueError("trained_on: no stretch")
        return trained_on


def _stretch(table: Mapping[str, Any]) -> Stretch:
    sources = {
        name: tuple(Source(**source) for source in table.get(name, ()))
        for name in ("sources", "gone")
    }
    return Stretch(**{**table, **sources})


def begun(config: Config, train: Sequence[Samples]) -> TrainedOn:
    """Return a description of the data of a new run with the configuration `config`. `train` are
    the datasets in the order of `data.train`."""
    length = config.model.text_length
    sources = tuple(
        Source(
            path=part.path,
            sha256=data.sha256,
            samples=data.samples(length),
            weight=str(part.weight),
            key=key,
        )
        for key, (part, data) in enumerate(zip(config.data.train, train, strict=True))
    )
    # if several sequences form one sample, the sample has the tokens of all these sequences
    tokens = config.task.sequences * config.model.seq_length
    ranks = config.data_size if config.data.split == "by_rank" else 1
    first = Stretch(
        step=0,
        sample=0,
        tokens=0,
        seed=config.run.seed,
        global_size=config.samples,
        seq_length=tokens,
        sources=sources,
        ranks=ranks,
    )
    return TrainedOn(train[0].tokenizer, train[0].tokenizer_sha256, (first,))


def synthetic(config: Config, name: str = "synthetic") -> TrainedOn:
    """Return the data of a run with synthetic samples, for tests and benchmarks."""
    model, size = config.model, config.batch.global_size
    source = Source(path=name, sha256="0" * 64, samples=10**9, weight="1", key=0)
    first = Stretch(
        step=0,
        sample=0,
        tokens=0,
        seed=config.run.seed,
        global_size=size,
        seq_length=model.seq_length,
        sources=(source,),
    )
    return TrainedOn(name, "0" * 64, (first,))


def changed_at(before: TrainedOn, now: TrainedOn, step: int) -> TrainedOn:
    """Return a copy of `before` with an additional stretch (a range of steps whose samples come
    from one order) that begins after step `step`. The new stretch has the data, the mixture, the
    seed and the batch size of `now`.

    Samples and tokens are still counted from the beginning of the run. The pattern in which the
    datasets alternate starts anew. A dataset with the same hash as an earlier dataset continues
    after the last used sample of the earlier dataset, so no sample is repeated or skipped. A new
    dataset begins at its first sample.
    """
    last = before.last
    fresh = now.last
    known = last.drawn(last.order(), step)
    left = list(known)
    sources = []
    for source in fresh.sources:
        same = next((old for old in left if old.sha256 == source.sha256), None)
        if same is not None:
            left.remove(same)
            sources.append(replace(source, key=same.key, drawn=same.drawn))
        else:
            new = sum(other.key >= len(known) for other in sources)
            sources.append(replace(source, key=len(known) + new))
    stretch = replace(
        fresh,
        step=step,
        sample=last.samples_after(step),
        tokens=last.tokens_after(step),
        sources=tuple(sources),
        gone=tuple(left),
    )
    return replace(before, stretches=(*before.stretches, stretch))
