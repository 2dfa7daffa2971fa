"""The GPT of the benchmark in plain torch, as a user of torch would write it. The batch is the
first dimension of tensors. Queries, keys and values come from one linear layer, and attention is
torch's scaled dot product attention (SDPA).

The parameters of this model have the same names as in ptdmpi. They also have the same random
values, because the values depend only on seed and name. So the losses of both models must agree.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ptdmpi.config import Config
from ptdmpi.model.random import initial


class Embedding(nn.Module):
    """Token embeddings and learned positions."""

    def __init__(self, config: Config, vocab_size: int) -> None:
        super().__init__()
        model = config.model
        self.word = nn.Embedding(vocab_size, model.hidden)
        self.position = nn.Embedding(model.seq_length, model.hidden)
        # the positions that this rank has; None if it has all positions
        self.positions: Tensor | None = None

    def forward(self, ids: Tensor) -> Tensor:
        """Return the embeddings [batch, tokens, hidden] of `ids` [batch, tokens]."""
        if self.positions is None:
            return self.word(ids) + self.position.weight
        return self.word(ids) + self.position(self.positions)


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return causal attention, for inputs [batch, heads, tokens, head size]."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Attention(nn.Module):
    """Causal attention with one linear layer for queries, keys and values."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        hidden = config.model.hidden
        self.head_size = config.model.head_size
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.out = nn.Linear(hidden, hidden)
        self.core: Callable[[Tensor, Tensor, Tensor], Tensor] = causal_attention

    def forward(self, x: Tensor) -> Tensor:
        """Return the output for the input `x`; both are [batch, tokens, hidden]."""
        # The tensor qkv has the shape [batch, tokens, heads, 3, head size]. The dimension of
        # the heads comes before the dimension of size 3 (queries, keys and values), so that
        # DTensor's contiguous shards of the rows of the weight consist of complete heads.
        qkv = self.qkv(x).unflatten(-1, (-1, 3, self.head_size))
        q, k, v = qkv.transpose(1, 2).unbind(3)
        return self.out(self.core(q, k, v).transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    """An MLP: two linear layers with tanh GELU between them."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        hidden = config.model.hidden
        inner = config.model.ffn_hidden
        self.up = nn.Linear(hidden, inner)
        self.down = nn.Linear(inner, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output for the input `x`; both are [batch, tokens, hidden]."""
        return self.down(F.gelu(self.up(x), approximate="tanh"))


class Block(nn.Module):
    """A transformer layer, with a norm before the attention and a norm before the MLP."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        hidden = config.model.hidden
        eps = config.model.norm_eps
        self.attention_norm = nn.LayerNorm(hidden, eps)
        self.attention = Attention(config)
        self.mlp_norm = nn.LayerNorm(hidden, eps)
        self.mlp = Mlp(config)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output for the input `x`; both are [batch, tokens, hidden]."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Gpt(nn.Module):
    """A pipeline stage of the GPT, or the complete GPT. The stage has the layers `layers`. The
    first stage also has the embedding, and the last stage also has the final norm and the head. If
    `autocast` is True, the forward pass enters bf16 autocast.
    """

    def __init__(self, config: Config, layers: range, vocab_size: int, autocast: bool) -> None:
        super().__init__()
        model = config.model
        self.autocast = autocast
        self.embedding = Embedding(config, vocab_size) if layers.start == 0 else None
        self.layers = nn.ModuleDict({str(layer): Block(config) for layer in layers})
        last = layers.stop == model.layers
        self.final_norm = nn.LayerNorm(model.hidden, model.norm_eps) if last else None
        self.head = nn.Linear(model.hidden, vocab_size, bias=False) if last else None
        self._initialise(config)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the stage. The input `x` of the first stage is token ids [batch,
        tokens], and of later stages hidden states [batch, tokens, hidden]."""
        if not self.autocast:
            return self._forward(x)
        with torch.autocast("cpu", torch.bfloat16):
            return self._forward(x)

    def _forward(self, x: Tensor) -> Tensor:
        if self.embedding is not None:
            x = self.embedding(x)
        for block in self.layers.values():
            x = block(x)
        return x if self.head is None else self.head(self.final_norm(x))

    @torch.no_grad()
    def _initialise(self, config: Config) -> None:
        model = config.model
        for name, parameter in self.named_parameters():
            start: float | str = model.init_std
            if "norm" in name:
                start = "ones" if name.endswith("weight") else "zeros"
            elif name.endswith("bias"):
                start = "zeros"
            elif name.endswith(("attention.out.weight", "mlp.down.weight")):
                start = model.init_std / math.sqrt(2 * model.layers)
            slabs = initial(config.run.seed, name, tuple(parameter.shape), start)
            whole = torch.cat([values for _, values in slabs])
            # reorder the rows of the weight, so that the rows for q, k and v of a head are together
            if ".qkv." in name:
                parts = (3, model.heads, model.head_size)
                whole = whole.unflatten(0, parts).transpose(0, 1).flatten(0, 2)
            parameter.copy_(whole)


def mean_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean loss over the tokens, in float32, for `logits` [batch, tokens, vocabulary]
    and `labels` [batch, tokens]."""
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())
