"""The trainer with transformers' GPT-2 or Mixtral, as users of transformers train these models. It
uses the model of transformers, and torch's autograd and fused AdamW. On several data ranks, it also
uses torch's DistributedDataParallel. Training starts with ptdmpi's initial weights."""

import contextlib
import json
import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.speed.case import Row, Variant
from benchmarks.speed.gpt_torch import mean_loss
from benchmarks.speed.plain_torch import Optimizer, microbatches
from ptdmpi.convert.families import family_for
from ptdmpi.convert.family import counterparts
from ptdmpi.inference.stored import declarations
from ptdmpi.model.random import initial


class TransformersTrainer:
    """The trainer of one data rank, with transformers' model. The trainer trains microbatches in a
    loop, with scaled dot product attention and without a key-value cache."""

    def __init__(self, row: Row, variant: Variant, rank: int) -> None:
        self.row = row
        self.rank = rank
        self.variant = variant
        model = _model(row)
        if variant.cast == "masters":
            model.bfloat16()
        parameters = list(model.parameters())
        masters = variant.cast == "masters"
        self.optimizer = Optimizer(row.config, parameters, masters=masters, divided=False)
        self.model = model
        if row.sizes.data > 1:
            self.model = DistributedDataParallel(model, gradient_as_bucket_view=True)

    def batch(self, step: int) -> list[tuple[Tensor, Tensor]]:
        """Return this rank's microbatches for a step."""
        return microbatches(self.row, self.rank, step)

    def step(self, step: int, batch: list[tuple[Tensor, Tensor]]) -> float:
        """Train a step and return its loss."""
        losses = []
        for number, (inputs, labels) in enumerate(batch):
            with self._sync(number == len(batch) - 1):
                with self._autocast():
                    logits = self.model(inputs).logits
                loss = mean_loss(logits, labels)
                (loss / len(batch)).backward()
            losses.append(loss.detach())
        self.optimizer.step()
        return float(torch.stack(losses).double().mean())

    def _sync(self, reduced: bool) -> contextlib.AbstractContextManager:
        """Return a context manager for a microbatch. After the microbatch, gradients are reduced
        over the data ranks only if `reduced` is True."""
        if reduced or not isinstance(self.model, DistributedDataParallel):
            return contextlib.nullcontext()
        return self.model.no_sync()

    def _autocast(self) -> contextlib.AbstractContextManager:
        if self.variant.cast == "microbatch":
            return torch.autocast("cpu", torch.bfloat16)
        return contextlib.nullcontext()


def _model(row: Row) -> nn.Module:
    """Return the model that `ptdmpi convert to-hf` would write for ptdmpi's initial weights."""
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    config = row.config
    family = family_for(config.model)
    settings = family.config(config.model, row.case.vocab_size)
    settings |= {"model_type": family.model_type, "use_cache": False}
    settings |= {"bos_token_id": 0, "eos_token_id": 0}
    tensors = {}
    needed = declarations(config, row.case.vocab_size)
    for pair in counterparts(family, config.model.layers, needed):
        slabs = initial(config.run.seed, pair.ours, pair.whole, needed[pair.ours].init)
        value = torch.cat([values for _, values in slabs])[pair.box.index]
        tensors[family.full(pair.theirs)] = (value.t() if pair.transposed else value).contiguous()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(settings))
        save_file(tensors, Path(folder) / "model.safetensors", {"format": "pt"})
        model = AutoModelForCausalLM.from_pretrained(
            folder, attn_implementation="sdpa", dtype=torch.float32
        )
    return model.train()
