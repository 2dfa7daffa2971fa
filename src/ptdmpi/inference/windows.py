"""A data set of torch (torch.utils.data.Dataset) with the samples in token shards."""

import operator
from pathlib import Path
from typing import SupportsIndex

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset as TorchDataset

from ptdmpi.base.errors import InputError, end_in_one_line
from ptdmpi.data.shards import Dataset


class TokenWindows(TorchDataset[dict[str, Tensor]]):
    """The samples in a directory of token shards, in the order of the shards.

    Sample i has "input_ids" and "labels", int64 [seq_length] each. The label at a position is the
    next token. A training run reads the same samples in a random order.
    """

    def __init__(self, shards: Dataset, seq_length: int) -> None:
        """Store the shards and the length of the samples. Raise InputError if `seq_length` is not
        an integer from 1, or if no shard has a complete sample."""
        self.shards = shards
        self.seq_length = _length(seq_length)
        self._samples = shards.samples(self.seq_length)

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        """Return sample `number`. Raise IndexError if there is no sample with this number, and
        InputError if it is not an integer."""
        try:
            number = operator.index(number)
        except TypeError:
            raise InputError(
                f"samples[{number!r}]: legal: an integer from {-len(self)} to {len(self) - 1}"
            ) from None
        if not -len(self) <= number < len(self):
            raise IndexError(f"sample {number} of {len(self)}")
        (row,) = self.shards.read(np.array([number % len(self)]), self.seq_length)
        tokens = torch.from_numpy(row)
        return {"input_ids": tokens[:-1], "labels": tokens[1:]}


def _length(given: SupportsIndex) -> int:
    """Return the length of the samples. Raise InputError unless it is an integer from 1."""
    try:
        length = operator.index(given)
    except TypeError:
        length = 0
    if length < 1:
        raise InputError(f"seq_length = {given!r}; legal: an integer from 1")
    return length


def open_shards(directory: str | Path, seq_length: int) -> TokenWindows:
    """Return the samples of `seq_length` tokens in a directory of shards.

    Tokens are verified when they are first read. Raise InputError if the directory has no shards,
    if the shards do not belong together, if no shard has a complete sample, or if `seq_length` is
    not an integer from 1. After this call, an InputError that the program does not catch ends it
    with one line and exit code 2.
    """
    end_in_one_line()
    return TokenWindows(Dataset(directory, verified=True), seq_length)
