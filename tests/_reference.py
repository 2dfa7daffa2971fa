"""The model once more, in plain PyTorch on one rank: what the parallel layers are compared with.

Written from the papers with whole tensors, batch first, [b, s, h], and no code of the project but
its configuration. `weights` are the logical parameters by name.
"""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from ptdmpi.config import ModelConfig

Weights = Mapping[str, Tensor]


def linear(weights: Weights, name: str, x: Tensor) -> Tensor:
    return F.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))


def norm(weights: Weights, name: str, x: Tensor, model: ModelConfig) -> Tensor:
    gain = weights[f"{name}.weight"]
    if model.norm == "rmsnorm":
        return x / (x.square().mean(-1, keepdim=True) + model.norm_eps).sqrt() * gain
    centred = x - x.mean(-1, keepdim=True)
    variance = centred.square().mean(-1, keepdim=True)
    return centred / (variance + model.norm_eps).sqrt() * gain + weights[f"{name}.bias"]


def rope(x: Tensor, model: ModelConfig) -> Tensor:
    """x [b, a, s, head size]: the pair (i, i + half) of position n as a complex number, turned by
    n theta^(-2i / head size)."""
    half = model.head_size // 2
    # tables of angles are float32 in every framework, whatever the type of the activations
    exponents = torch.arange(half, dtype=torch.float32) * 2 / model.head_size
    positions = torch.arange(x.shape[-2], dtype=torch.float32)
    angles = positions[:, None] * (1.0 / model.rope_theta**exponents)
    turn = torch.complex(angles.cos().to(x.dtype), angles.sin().to(x.dtype))
    turned = torch.complex(x[..., :half], x[..., half:]) * turn
    return torch.cat((turned.real, turned.imag), -1)


def attention(weights: Weights, name: str, x: Tensor, model: ModelConfig) -> Tensor:
    b, s, _ = x.shape
    size, groups = model.head_size, model.kv_heads
    widths = (model.hidden, groups * size, groups * size)
    q, k, v = (
        part.view(b, s, -1, size).transpose(1, 2)
        for part in linear(weights, f"{name}.qkv", x).split(widths, -1)
    )
    if model.positions == "rope":
        q, k = rope(q, model), rope(k, model)
    causal = model.attention == "causal"
    out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
    return linear(weights, f"{name}.out", out.transpose(1, 2).reshape(b, s, -1))


def mlp(weights: Weights, name: str, x: Tensor, model: ModelConfig) -> Tensor:
    up = linear(weights, f"{name}.up", x)
    if model.activation == "swiglu":
        gate, value = up.tensor_split(2, -1)
        return linear(weights, f"{name}.down", F.silu(gate) * value)
    return linear(weights, f"{name}.down", gelu(up, model))


def gelu(x: Tensor, model: ModelConfig) -> Tensor:
    if model.activation == "gelu_exact":
        return x * (1 + torch.erf(x / 2**0.5)) / 2
    return F.gelu(x, approximate="tanh")


def block(weights: Weights, name: str, x: Tensor, model: ModelConfig) -> Tensor:
    if model.block_norm == "post":
        x = x + attention(weights, f"{name}.attention", x, model)
        x = norm(weights, f"{name}.attention_norm", x, model)
        return norm(weights, f"{name}.mlp_norm", x + mlp(weights, f"{name}.mlp", x, model), model)
    x = x + attention(
        weights, f"{name}.attention", norm(weights, f"{name}.attention_norm", x, model), model
    )
    return x + mlp(weights, f"{name}.mlp", norm(weights, f"{name}.mlp_norm", x, model), model)


def hidden(
    weights: Weights, model: ModelConfig, ids: Tensor, types: Tensor | None = None
) -> Tensor:
    """ids and types [b, s] -> [b, s, h]."""
    x = F.embedding(ids, weights["embedding.word.weight"])
    if model.positions == "learned":
        x = x + weights["embedding.position.weight"][: ids.shape[1]]
    if model.token_types:
        x = x + F.embedding(types, weights["embedding.token_type.weight"])
    if model.embedding_norm:
        x = norm(weights, "embedding.norm", x, model)
    for layer in range(model.layers):
        x = block(weights, f"layers.{layer}", x, model)
    return x if model.block_norm == "post" else norm(weights, "final_norm", x, model)


def logits(
    weights: Weights, model: ModelConfig, ids: Tensor, types: Tensor | None = None
) -> Tensor:
    """ids and types [b, s] -> [b, s, V]."""
    x = hidden(weights, model, ids, types)
    if model.output_head == "mlm":
        x = norm(weights, "mlm.norm", gelu(linear(weights, "mlm.dense", x), model), model)
    table = "embedding.word.weight" if model.tie_embeddings else "head.weight"
    return F.linear(x, weights[table], weights.get("head.bias"))


def order_logits(weights: Weights, model: ModelConfig, ids: Tensor, types: Tensor) -> Tensor:
    """ids and types [b, s] -> [b, 2]."""
    first = hidden(weights, model, ids, types)[:, 0]
    return linear(weights, "sentence.order", linear(weights, "sentence.pooler", first).tanh())


def summed_loss(
    weights: Weights, model: ModelConfig, ids: Tensor, labels: Tensor, token_weights: Tensor
) -> Tensor:
    """Sum over tokens [b, s] of weight * cross-entropy, in nats."""
    rows = logits(weights, model, ids).flatten(0, 1)
    losses = F.cross_entropy(rows, labels.flatten(), reduction="none")
    return (losses * token_weights.flatten()).sum()


def leaves(weights: Weights) -> dict[str, Tensor]:
    """Copies that gather gradients."""
    return {name: value.clone().requires_grad_() for name, value in weights.items()}
