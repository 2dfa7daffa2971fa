"""GPT-2 of transformers in one process, as its users train it: the model, autograd, and torch's
fused AdamW, starting with the weights of `plain_torch`."""

import contextlib

import torch
from torch import Tensor, nn

from benchmarks.speed.case import Row, Variant
from benchmarks.speed.gpt_torch import Gpt, mean_loss
from benchmarks.speed.plain_torch import Optimizer, microbatches
from ptdmpi.config import Config
from ptdmpi.convert.families import family_for
from ptdmpi.convert.family import counterparts
from ptdmpi.inference.stored import declarations


class TransformersTrainer:
    """The trainer of the single rank: microbatches in a loop, scaled dot product attention, no
    key-value cache."""

    def __init__(self, row: Row, variant: Variant, rank: int) -> None:
        self.row = row
        self.rank = rank
        self.variant = variant
        self.model = _model(row.config, row.case.vocab_size)
        if variant.cast == "masters":
            self.model.bfloat16()
        parameters = list(self.model.parameters())
        masters = variant.cast == "masters"
        self.optimizer = Optimizer(row.config, parameters, masters=masters, divided=False)

    def batch(self, step: int) -> list[tuple[Tensor, Tensor]]:
        """Return the microbatches for a step."""
        return microbatches(self.row, 0, step)

    def step(self, step: int, batch: list[tuple[Tensor, Tensor]]) -> float:
        """Train a step and return its loss."""
        losses = []
        for inputs, labels in batch:
            with self._autocast():
                logits = self.model(inputs).logits
            loss = mean_loss(logits, labels)
            (loss / len(batch)).backward()
            losses.append(loss.detach())
        self.optimizer.step()
        return float(torch.stack(losses).double().mean())

    def _autocast(self) -> contextlib.AbstractContextManager:
        if self.variant.cast == "microbatch":
            return torch.autocast("cpu", torch.bfloat16)
        return contextlib.nullcontext()


def _model(config: Config, vocab_size: int) -> nn.Module:
    """Return the model that `ptdmpi convert to-hf` would write for the weights of `plain_torch`."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = config.model
    family = family_for(sizes)
    settings = {"use_cache": False, "attn_implementation": "sdpa"}
    settings |= {"bos_token_id": 0, "eos_token_id": 0}
    model = GPT2LMHeadModel(GPT2Config(**family.config(sizes, vocab_size), **settings))
    weights = Gpt(config, range(sizes.layers), vocab_size, autocast=False).state_dict()
    renamed = {}
    for pair in counterparts(family, declarations(config, vocab_size)):
        value = weights[pair.ours]
        if ".qkv." in pair.ours:  # reorder from q, k, v of each head to all q, all k, all v
            heads = (sizes.heads, 3, sizes.head_size)
            value = value.unflatten(0, heads).transpose(0, 1).flatten(0, 2)
        renamed[family.full(pair.theirs)] = value.t() if pair.transposed else value
    model.load_state_dict(renamed)
    return model.train()
