"""The samples of a run that uses the user's own dataset classes."""

from collections.abc import Iterator, Sequence

from ptdmpi.comm.communicator import Communicator
from ptdmpi.config import Config, InputError
from ptdmpi.data.batches import MicrobatchRows, Steps
from ptdmpi.data.order import SampleOrder
from ptdmpi.data.own import OwnBatches, OwnDataset, in_order, is_own
from ptdmpi.lineage.trained_on import Samples


class OwnSource:
    """A source of samples that uses the user's own dataset classes. `data.train` and `data.valid`
    contain the names of these classes."""

    def __init__(self, config: Config) -> None:
        """Create the datasets. Raises InputError if a dataset cannot be used, or if the datasets
        are not compatible with each other."""
        self.config = config
        paths = [part.path for part in config.data.train]
        _require(config, [*paths, *config.data.valid_paths])
        length = config.model.seq_length
        self._train = [OwnDataset(path, length) for path in paths]
        self._valid = [OwnDataset(path, length) for path in config.data.valid_paths]
        self.train: Sequence[Samples] = self._train
        self.valid: Sequence[Samples] = self._valid
        needed = max(dataset.vocab_size for dataset in (*self._train, *self._valid))
        self.vocab_size = config.model.vocab_size or needed
        if self.vocab_size < needed:
            raise InputError(
                f"model.vocab_size = {self.vocab_size}, but the datasets need {needed}; legal: "
                f"{needed} or more, or 0: just as many"
            )

    def steps(self, order: SampleOrder, data: Communicator) -> Steps:
        """Return this rank's training microbatches."""
        return OwnBatches(
            self._train,
            order,
            global_size=self.config.batch.global_size,
            micro_size=self.config.batch.micro_size,
            data_rank=data.rank,
            data_size=data.size,
        )

    def validation(self, number: int, data: Communicator) -> Iterator[MicrobatchRows]:
        """Yield the microbatches of a validation dataset that this data rank reads."""
        return in_order(
            self._valid[number],
            self.config.log.most_validated,
            micro_size=self.config.batch.micro_size,
            data_rank=data.rank,
            data_size=data.size,
        )

    def ids(self, number: int, sample: int) -> list[int]:
        """Return the tokens of one training sample."""
        ids, _ = self._train[number].row(sample)
        return ids[:-1].tolist()

    def remarks(self) -> Iterator[str]:
        """Yield a line with the number of samples of each dataset."""
        for dataset in (*self._train, *self._valid):
            yield f"{dataset.path}: {dataset.samples(dataset.seq_length):,} samples"


def _require(config: Config, paths: Sequence[str]) -> None:
    """Raise InputError for settings that cannot be combined with the user's own dataset classes."""
    shards = [path for path in paths if not is_own(path)]
    if shards:
        raise InputError(
            f"{shards[0]} is a directory of shards, and {next(filter(is_own, paths))} is a class; "
            "legal: data.train and data.valid of one kind"
        )
    excluded = {
        'model.attention = "bidirectional"': config.model.masked,
        "data.document_boundaries = true": config.data.document_boundaries,
        "log.bigram_baseline = true": config.log.bigram_baseline,
    }
    for key, is_set in excluded.items():
        if is_set:
            raise InputError(f"{key} needs shards; the datasets of this run are classes")
