"""What layers see of calibration samples: one layer in memory at a time."""

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
from ptdmpi.model.batch import Batch
from ptdmpi.model.stage import Stage

ROWS = 8  # sequences that go through a layer together


@dataclass(frozen=True)
class CalibrationSamples:
    """So many sequences of `length` tokens, spread evenly over the shards in `directory`."""

    directory: Path
    count: int
    length: int

    def read(self, stored: StoredModel) -> Tensor:
        """Their ids [count, length]. Raises InputError."""
        dataset, length = Dataset(self.directory), self.length
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
    """The activations of some samples on their way through a model, in float32. Layers are asked in
    their order; each sees what those before it, in few bits, have made of the samples."""

    def __init__(self, stored: StoredModel, ids: Tensor) -> None:
        self.vocab_size = stored.vocab_size
        config = stored.config(precision="fp32")
        if config.model.masked:
            raise InputError(
                f"{stored.path} sees both sides of a token: it has no calibration samples; legal: "
                "--method absmax"
            )
        if config.model.positions == "rope":  # whose table is as long as the samples
            config = config.replace("model", seq_length=ids.shape[1])
        self.config: Config = config
        self.batches = [_batch(rows) for rows in ids.split(ROWS)]
        self.activations: Sequence[Tensor | None] = [None for _ in self.batches]

    def hessians(self, stage: Stage, modules: Sequence[str]) -> dict[str, Tensor]:
        """X^T X [i, i], float64, of the inputs X of some linears of a layer over all samples."""
        found: dict[str, Tensor] = {}
        hooks = []
        for name in modules:
            add: Callable[[Any, Any], None] = partial(_add, found, name)
            hooks.append(stage.get_submodule(name).register_forward_pre_hook(add))
        for _ in self._through(stage):
            pass
        for hook in hooks:
            hook.remove()
        return found

    def advance(self, stage: Stage) -> None:
        """Go on with what a layer, as it is now, makes of the activations."""
        self.activations = list(self._through(stage))

    def _through(self, stage: Stage) -> Iterator[Tensor]:
        with torch.no_grad():
            for batch, x in zip(self.batches, self.activations, strict=True):
                yield stage.hidden(batch, x, None)


def _add(found: dict[str, Tensor], name: str, module: Any, given: tuple[Tensor, ...]) -> None:
    x = given[0].flatten(0, -2)
    product = (x.t() @ x).double()
    found[name] = product if name not in found else found[name].add_(product)


def _batch(rows: Tensor) -> Batch:
    ids = rows.t().contiguous()
    return Batch(ids, ids, None, torch.zeros(len(rows), dtype=torch.int64))
