"""transformers' GPT-2 in one process, as its user trains it: the model, autograd, and torch's fused
AdamW, from plain torch's weights."""

import contextlib

import torch
from torch import Tensor, nn

from benchmarks.speed.case import Row, Variant
from benchmarks.speed.gpt_torch import Gpt, mean_loss
from benchmarks.speed.plain_torch import Optimizer, microbatches
from ptdmpi.config import Config

# This project's names of a layer's parts, beside those of GPT-2.
PARTS = {
    "attention_norm": "ln_1",
    "attention.qkv": "attn.c_attn",
    "attention.out": "attn.c_proj",
    "mlp_norm": "ln_2",
    "mlp.up": "mlp.c_fc",
    "mlp.down": "mlp.c_proj",
}
ENDS = {
    "embedding.word": "transformer.wte",
    "embedding.position": "transformer.wpe",
    "final_norm": "transformer.ln_f",
    "head": "lm_head",
}


class TransformersTrainer:
    """One process: microbatches in a loop, scaled dot product attention, no cache."""

    def __init__(self, row: Row, variant: Variant, rank: int) -> None:
        self.row, self.rank, self.variant = row, rank, variant
        self.model = _model(row.config, row.case.vocab_size)
        if variant.cast == "masters":
            self.model.bfloat16()
        parameters = list(self.model.parameters())
        masters = variant.cast == "masters"
        self.optimizer = Optimizer(row.config, parameters, masters, divided=False)

    def batch(self, step: int) -> list[tuple[Tensor, Tensor]]:
        return microbatches(self.row, 0, step)

    def step(self, step: int, batch: list[tuple[Tensor, Tensor]]) -> float:
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
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = config.model
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=vocab_size,
            n_positions=sizes.seq_length,
            n_embd=sizes.hidden,
            n_layer=sizes.layers,
            n_head=sizes.heads,
            n_inner=sizes.ffn_hidden,
            activation_function="gelu_pytorch_tanh",
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            layer_norm_epsilon=sizes.norm_eps,
            tie_word_embeddings=False,
            use_cache=False,
            attn_implementation="sdpa",
            bos_token_id=0,
            eos_token_id=0,
        )
    )
    whole = Gpt(config, range(sizes.layers), vocab_size, autocast=False)
    renamed = {}
    for name, value in whole.state_dict().items():
        module, kind = name.rsplit(".", 1)
        if module in ENDS:
            renamed[f"{ENDS[module]}.{kind}"] = value
            continue
        number, part = module.removeprefix("layers.").split(".", 1)
        if part == "attention.qkv":  # from q, k, v of each head to all q, all k, all v
            heads = (sizes.heads, 3, sizes.head_size)
            value = value.unflatten(0, heads).transpose(0, 1).flatten(0, 2)
        if value.dim() == 2:  # its linears are stored by inputs
            value = value.t()
        renamed[f"transformer.h.{number}.{PARTS[part]}.{kind}"] = value
    model.load_state_dict(renamed)
    return model.train()
