"""The activations of GPTQ's calibration samples between the layers of a model. Only one layer is in
memory at a time."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ptdmpi.config import Config, InputError
from ptdmpi.data.shards import Dataset
from ptdmpi.inference.stored import StoredModel
from ptdmpi.model.batch import Microbatch
from ptdmpi.model.stage import Stage

ROWS = 8  # the number of sequences that a layer processes at a time


@dataclass(frozen=True)
class CalibrationSamples:
    """The calibration samples: `count` sequences of `length` tokens, spread evenly over the shards
    in `directory`."""

    directory: Path
    count: int
    length: int

    def read(self, stored: StoredModel) -> Tensor:
        """Return the token ids of the samples, [count, length]. Raise InputError if the shards do
        not fit the model, or have too few samples."""
        dataset = Dataset(self.directory, verified=True)
        length = self.length
        known = stored.config().model.seq_length
        if not 2 <= length <= known:
            raise InputError(f"--length {length}: legal: 2 to {known}, the model's seq_length")
        if dataset.vocab_size > stored.vocab_size:
            raise InputError(
                f"{self.directory} has a vocabulary of {dataset.vocab_size}, the model one of "
                f"{stored.vocab_size}: not the same tokenizer"
            )
        there = dataset.samples(length - 1)
        if there < self.count:
            raise InputError(
                f"--samples {self.count}: {self.directory} has {there} of {length} tokens"
            )
        chosen = np.arange(self.count, dtype=np.int64) * there // self.count
        return torch.from_numpy(dataset.read(chosen, length - 1).astype(np.int64))


class Calibration:
    """The activations of calibration samples between the layers of a model, in float32.

    The layers are processed in order. The input of each layer is the output of the quantized layers
    before it.
    """

    def __init__(self, stored: StoredModel, ids: Tensor) -> None:
        """Prepare the samples `ids` [samples, tokens] for the first layer. Raise InputError for a
        masked language model."""
        self.vocab_size = stored.vocab_size
        config = stored.config(precision="fp32")
        if config.model.masked:
            raise InputError(
                f"{stored.path} is a masked language model, for which there are no calibration "
                "samples; legal: --method absmax"
            )
        # shorten the sequence length, so that the table of rotary angles is only as long as a
        # sample
        if config.model.positions == "rope":
            config = config.replace("model", seq_length=ids.shape[1])
        self.config: Config = config
        self.batches = [_batch(rows) for rows in ids.split(ROWS)]
        self.activations: Sequence[Tensor | None] = [None for _ in self.batches]

    def hessians(self, stage: Stage, modules: Sequence[str]) -> dict[str, Tensor]:
        """Return the matrix X^T X [inputs, inputs], in float64, for each linear layer in `modules`,
        by its name. The matrix X contains the inputs of the linear layer for all samples.
        """
        sums: dict[str, Tensor] = {}
        hooks = []
        for name in modules:
            add: Callable[[Any, Any], None] = partial(_add, sums, name)
            hooks.append(stage.get_submodule(name).register_forward_pre_hook(add))
        for _ in self._outputs(stage):
            pass
        for hook in hooks:
            hook.remove()
        return sums

    def advance(self, stage: Stage) -> None:
        """Replace the stored activations by the outputs of the layer, computed with its current
        weights."""
        self.activations = list(self._outputs(stage))

    def _outputs(self, stage: Stage) -> Iterator[Tensor]:
        with torch.no_grad():
            for batch, x in zip(self.batches, self.activations, strict=True):
                yield stage.hidden(batch, x, None)


def _add(sums: dict[str, Tensor], name: str, module: Any, inputs: tuple[Tensor, ...]) -> None:
    """Add X^T X to the sum `sums[name]` of the linear layer `name`; X is the input of this layer.
    PyTorch calls this function as a hook."""
    x = inputs[0].flatten(0, -2)
    product = (x.t() @ x).double()
    if name in sums:
        sums[name] += product
    else:
        sums[name] = product


def _batch(rows: Tensor) -> Microbatch:
    ids = rows.t().contiguous()
    return Microbatch(ids, ids, None, torch.zeros(len(rows), dtype=torch.int64))
