"""The samples of a run that is trained on a labelled task."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from ptdmpi.base.words import counted
from ptdmpi.comm.communicator import Communicator
from ptdmpi.config import Config, InputError
from ptdmpi.data.batches import MicrobatchRows, Steps
from ptdmpi.data.labelled import LabelledBatches, in_order
from ptdmpi.data.order import SampleOrder
from ptdmpi.evaluate.labelled import read
from ptdmpi.lineage.trained_on import Samples
from ptdmpi.train.tasks.files import task_framing


class TaskSource:
    """A source whose samples are the lines in the files of a task. The texts are tokenized when the
    files are read."""

    def __init__(self, config: Config) -> None:
        """Read the files of the task. Raises InputError if a file cannot be used, or if no
        tokenizer is found."""
        self.config = config
        frame = task_framing(config)
        self.form = frame.form
        self.vocab_size = config.model.vocab_size or frame.needed
        if self.vocab_size < frame.needed:
            raise InputError(
                f"model.vocab_size = {self.vocab_size}, but the tokenizer of the task needs "
                f"{frame.needed}; legal: {frame.needed} or more, or 0: just as many"
            )
        self._train = [read(Path(part.path), config.task, frame) for part in config.data.train]
        self._valid = [read(Path(path), config.task, frame) for path in config.data.valid_paths]
        self.train: Sequence[Samples] = self._train
        self.valid: Sequence[Samples] = self._valid

    @property
    def _micro(self) -> int:
        """Return the number of samples in a microbatch. The configuration gives the microbatch size
        in sequences, and a sample may consist of several sequences."""
        return self.config.batch.micro_size // self.config.task.sequences

    def steps(self, order: SampleOrder, data: Communicator) -> Steps:
        """Return this rank's training microbatches."""
        return LabelledBatches(
            self._train,
            order,
            self.form,
            samples=self.config.samples,
            micro=self._micro,
            data_rank=data.rank,
            data_size=data.size,
        )

    def validation(self, number: int, data: Communicator) -> Iterator[MicrobatchRows]:
        """Yield the microbatches of a validation file that this data rank reads."""
        return in_order(
            self._valid[number],
            self.form,
            micro=self._micro,
            data_rank=data.rank,
            data_size=data.size,
            most=self.config.log.most_validated,
        )

    def ids(self, number: int, sample: int) -> list[int]:
        """Return the tokens of one training sample. If the sample has several candidate answers,
        return the tokens of the sequence with the first candidate."""
        file = self._train[number]
        return file.rows[sample * file.sequences].ids.tolist()

    def remarks(self) -> Iterator[str]:
        """Yield a log line about each file: the number of its samples, and the number of sequences
        that were cut because they were too long."""
        for file in (*self._train, *self._valid):
            cut = f"{file.cut} of {counted(len(file.rows), 'sequence')} cut"
            if file.cut:
                cut += f" by {counted(file.lost, 'token')}: longer than model.seq_length"
            yield f"{file.path}: {counted(len(file.labels), 'sample')}, {cut}"
