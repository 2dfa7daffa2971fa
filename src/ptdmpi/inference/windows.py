"""A data set of torch (torch.utils.data.Dataset) with the samples in token shards."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset as TorchDataset

from ptdmpi.data.shards import Dataset


class TokenWindows(TorchDataset[dict[str, Tensor]]):
    """The samples in a directory of token shards, in the order of the shards.

    Sample i has "input_ids" and "labels", int64 [seq_length] each. The label at a position is the
    next token. A training run reads the same samples in a random order.
    """

    def __init__(self, shards: Dataset, seq_length: int) -> None:
        self.shards = shards
        self.seq_length = seq_length
        self._samples = shards.samples(seq_length)

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        """Return sample `number`. Raise IndexError if there is no sample with this number."""
        if not -len(self) <= number < len(self):
            raise IndexError(f"sample {number} of {len(self)}")
        (row,) = self.shards.read(np.array([number % len(self)]), self.seq_length)
        tokens = torch.from_numpy(row)
        return {"input_ids": tokens[:-1], "labels": tokens[1:]}


def open_shards(directory: str | Path, seq_length: int) -> TokenWindows:
    """Return the samples of `seq_length` tokens in a directory of shards.

    Tokens are verified when they are first read. Raise InputError if the directory has no shards,
    if the shards do not belong together, or if no shard has a complete sample.
    """
    return TokenWindows(Dataset(directory, verified=True), seq_length)
