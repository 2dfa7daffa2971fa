"""The model in plain PyTorch on one rank, the reference of the parallel layers.

Written from the papers with whole tensors, batch first, [b, s, h], and no code of the project but
its configuration. `weights` are the logical parameters by name.
"""

import itertools
import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from ptdmpi.config import ModelConfig

Weights = Mapping[str, Tensor]


def linear(weights: Weights, name: str, x: Tensor) -> Tensor:
    """Return x W^T + b, with the bias if there is one."""
    return F.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))


def norm(weights: Weights, name: str, x: Tensor, model: ModelConfig) -> Tensor:
    """Return the RMSNorm or LayerNorm of x over its last dim."""
    gain = weights[f"{name}.weight"] + model.zero_centered_norm
    if model.norm == "rmsnorm":
        return x / (x.square().mean(-1, keepdim=True) + model.norm_eps).sqrt() * gain
    centred = x - x.mean(-1, keepdim=True)
    variance = centred.square().mean(-1, keepdim=True)
    return centred / (variance + model.norm_eps).sqrt() * gain + weights[f"{name}.bias"]


def rope(x: Tensor, model: ModelConfig) -> Tensor:
    """Rotate x [b, a, s, head size] by its positions (Su et al. 2021, arXiv 2104.09864).

    The pair (i, i + half) of position n is a complex number, which is rotated by the angle
    n theta^(-2i / head size).
    """
    half = model.head_size // 2
    # tables of angles are float32 in every framework, whatever the type of the activations
    exponents = torch.arange(half, dtype=torch.float32) * 2 / model.head_size
    positions = torch.arange(x.shape[-2], dtype=torch.float32)
    frequencies = 1.0 / model.rope_theta**exponents
    if model.rope_scaling == "llama3":
        frequencies = torch.tensor([stretched(float(f), model) for f in frequencies])
    length = 1.0
    if model.rope_scaling == "yarn":
        frequencies = torch.tensor([yarn(n, float(f), model) for n, f in enumerate(frequencies)])
        length = model.rope_attention_factor or 1 + 0.1 * math.log(model.rope_factor)
    angles = positions[:, None] * frequencies
    turn = length * torch.complex(angles.cos().to(x.dtype), angles.sin().to(x.dtype))
    turned = torch.complex(x[..., :half], x[..., half:]) * turn
    return torch.cat((turned.real, turned.imag), -1)


def stretched(frequency: float, model: ModelConfig) -> float:
    """Return a frequency scaled by its wavelength, as Llama 3's `apply_scaling` does."""
    length, wave = model.rope_original_length, 2 * torch.pi / frequency
    low, high = model.rope_low_factor, model.rope_high_factor
    if wave < length / high:
        return frequency
    if wave > length / low:
        return frequency / model.rope_factor
    smooth = (length / wave - low) / (high - low)
    return (1 - smooth) * frequency / model.rope_factor + smooth * frequency


def yarn(number: int, frequency: float, model: ModelConfig) -> float:
    """Return frequency `number` of a head as YaRN's code scales it: slower after a ramp."""

    def place(turns: float) -> float:
        wave = model.rope_original_length / turns
        return model.head_size / 2 * math.log(wave / (2 * math.pi), model.rope_theta)

    first = max(0, math.floor(place(model.rope_high_factor)))
    last = min(model.head_size - 1, math.ceil(place(model.rope_low_factor)))
    share = min(1.0, max(0.0, (number - first) / max(last - first, 1e-3)))
    return share * frequency / model.rope_factor + (1 - share) * frequency


def attention(weights: Weights, name: str, x: Tensor, model: ModelConfig, layer: int = 0) -> Tensor:
    """Return attention of x [b, s, h], computed by its formula on one rank."""
    if model.latent:
        return latent_attention(weights, name, x, model)
    b, s, _ = x.shape
    size, groups = model.head_size, model.kv_heads
    widths = (model.heads * size, groups * size, groups * size)
    q, k, v = (
        part.reshape(b, s, -1, size).transpose(1, 2)
        for part in linear(weights, f"{name}.qkv", x).split(widths, -1)
    )
    if model.qk_norm:
        q = norm(weights, f"{name}.query_norm", q, model)
        k = norm(weights, f"{name}.key_norm", k, model)
    if model.positions == "rope":
        q, k = rope(q, model), rope(k, model)
    k, v = (part.repeat_interleave(model.heads // groups, 1) for part in (k, v))
    scores = q @ k.transpose(-1, -2) / (model.query_scalar or size) ** 0.5
    if model.attention_softcap:
        scores = model.attention_softcap * torch.tanh(scores / model.attention_softcap)
    distance = torch.arange(s)[:, None] - torch.arange(s)[None, :]
    hidden = (distance < 0) & torch.tensor(model.attention == "causal")
    slides = {"all": True, "even": layer % 2 == 0}
    if model.sliding_window and slides.get(str(model.sliding_layers)):
        hidden = hidden | (distance >= model.sliding_window)
    out = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v
    return linear(weights, f"{name}.out", out.transpose(1, 2).reshape(b, s, -1))


def latent_attention(weights: Weights, name: str, x: Tensor, model: ModelConfig) -> Tensor:
    """Return multi-head latent attention of x [b, s, h] (arXiv 2405.04434, equations 37 to 47)."""
    rotated = model.rope_head_size
    down = linear(weights, f"{name}.down", x)
    latent, key = down[..., model.q_lora_rank :].split((model.kv_lora_rank, rotated), -1)
    latent = norm(weights, f"{name}.kv_norm", latent, model)
    if model.q_lora_rank:
        queries = norm(weights, f"{name}.q_norm", down[..., : model.q_lora_rank], model)
        q = linear(weights, f"{name}.q_up", queries)
    else:
        q = linear(weights, f"{name}.q", x)
    plain = model.head_size - rotated

    def by_head(y: Tensor) -> Tensor:
        return y.unflatten(-1, (model.heads, -1)).transpose(1, 2)

    k, v = (by_head(linear(weights, f"{name}.kv_up", latent))).tensor_split([plain], -1)
    q, turning = by_head(q).tensor_split([plain], -1)
    scores = q @ k.mT + rope_of_pairs(turning, model) @ rope_of_pairs(key[:, None], model).mT
    growth = 1 + 0.1 * model.rope_mscale * math.log(model.rope_factor)
    scores = scores * growth**2 / (model.query_scalar or model.head_size) ** 0.5
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    out = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v
    return linear(weights, f"{name}.out", out.transpose(1, 2).flatten(2))


def rope_of_pairs(x: Tensor, model: ModelConfig) -> Tensor:
    """Rotate x [b, a, s, r], whose pairs of elements are neighbours."""
    sizes = model.model_copy(update={"head_size": model.rope_head_size})
    return rope(torch.cat((x[..., 0::2], x[..., 1::2]), -1), sizes)


def mlp(weights: Weights, name: str, x: Tensor, model: ModelConfig) -> Tensor:
    """Return the MLP of x [b, s, h], or its mixture of experts."""
    if not model.experts:
        return feed_forward(weights, name, x, model)
    scores = linear(weights, f"{name}.router", x)
    scores = scores.sigmoid() if model.router == "sigmoid" else scores.softmax(-1)
    chosen = torch.zeros_like(scores)
    ranked = scores.detach()
    if model.balance == "bias":
        ranked = ranked + weights[f"{name}.router.balance"].detach()
    for place in itertools.product(*map(range, scores.shape[:-1])):
        chosen[place][best_experts(ranked[place].tolist(), model)] = 1.0
    shares = scores * chosen
    if model.router_normalize:
        shares = shares / shares.sum(-1, keepdim=True)
    shares = shares * model.router_scale
    y = feed_forward(weights, f"{name}.shared", x, model) if model.shared_experts else 0.0
    for number in range(model.experts):  # every expert computes every token
        each = feed_forward(weights, f"{name}.experts.{number}", x, model)
        y = y + shares[..., number : number + 1] * each
    return y


def best_experts(scores: list[float], model: ModelConfig) -> list[int]:
    """Return the experts of a token with these scores: the best of the best groups."""
    size = model.experts // model.router_groups
    counted = 2 if model.router == "sigmoid" else 1

    def of_group(group: int) -> float:
        members = sorted(scores[group * size : (group + 1) * size], reverse=True)
        return sum(members[:counted])

    groups = sorted(range(model.router_groups), key=of_group, reverse=True)
    best = groups[: model.router_top_groups]
    candidates = [number for number in range(model.experts) if number // size in best]
    ranked = sorted(candidates, key=lambda number: -scores[number])
    return ranked[: model.experts_per_token]


def feed_forward(weights: Weights, name: str, x: Tensor, model: ModelConfig) -> Tensor:
    """Return two linears of x [b, s, h] around the activation."""
    up = linear(weights, f"{name}.up", x)
    if model.activation in ("swiglu", "geglu"):
        gate, value = up.tensor_split(2, -1)
        gate = F.silu(gate) if model.activation == "swiglu" else gelu(gate, model)
        return linear(weights, f"{name}.down", gate * value)
    return linear(weights, f"{name}.down", gelu(up, model))


def gelu(x: Tensor, model: ModelConfig) -> Tensor:
    """Return GELU of x, exact or by tanh, as the model asks."""
    if model.activation == "gelu_exact":
        return x * (1 + torch.erf(x / 2**0.5)) / 2
    return F.gelu(x, approximate="tanh")


def block(weights: Weights, name: str, x: Tensor, model: ModelConfig, layer: int = 0) -> Tensor:
    """Return the output [b, s, h] of one layer."""

    def attend(x: Tensor) -> Tensor:
        return attention(weights, f"{name}.attention", x, model, layer)

    def normed(kind: str, x: Tensor) -> Tensor:
        return norm(weights, f"{name}.{kind}", x, model)

    if model.block_norm == "post":
        x = normed("attention_norm", x + attend(x))
        return normed("mlp_norm", x + mlp(weights, f"{name}.mlp", x, model))
    y = attend(normed("attention_norm", x))
    x = x + (normed("attention_post_norm", y) if model.block_norm == "sandwich" else y)
    y = mlp(weights, f"{name}.mlp", normed("mlp_norm", x), model)
    return x + (normed("mlp_post_norm", y) if model.block_norm == "sandwich" else y)


def hidden(
    weights: Weights, model: ModelConfig, ids: Tensor, types: Tensor | None = None
) -> Tensor:
    """Return the hidden states [b, s, h] of ids and types [b, s]."""
    x = F.embedding(ids, weights["embedding.word.weight"])
    x = x * model.hidden**0.5 if model.scale_embedding else x
    if model.positions == "learned":
        x = x + weights["embedding.position.weight"][: ids.shape[1]]
    if model.token_types:
        x = x + F.embedding(types, weights["embedding.token_type.weight"])
    if model.embedding_norm:
        x = norm(weights, "embedding.norm", x, model)
    for layer in range(model.layers):
        x = block(weights, f"layers.{layer}", x, model, layer)
    return x if model.block_norm == "post" else norm(weights, "final_norm", x, model)


def logits(
    weights: Weights, model: ModelConfig, ids: Tensor, types: Tensor | None = None
) -> Tensor:
    """Return the logits [b, s, V] of ids and types [b, s]."""
    x = hidden(weights, model, ids, types)
    if model.output_head == "mlm":
        x = norm(weights, "mlm.norm", gelu(linear(weights, "mlm.dense", x), model), model)
    table = "embedding.word.weight" if model.tie_embeddings else "head.weight"
    y = F.linear(x, weights[table], weights.get("head.bias"))
    return model.logit_softcap * torch.tanh(y / model.logit_softcap) if model.logit_softcap else y


def order_logits(weights: Weights, model: ModelConfig, ids: Tensor, types: Tensor) -> Tensor:
    """Return the logits [b, 2] of the order of sentences, for ids and types [b, s]."""
    first = hidden(weights, model, ids, types)[:, 0]
    return linear(weights, "sentence.order", linear(weights, "sentence.pooler", first).tanh())


def summed_loss(
    weights: Weights, model: ModelConfig, ids: Tensor, labels: Tensor, token_weights: Tensor
) -> Tensor:
    """Return the sum over tokens [b, s] of weight * cross-entropy, in nats."""
    rows = logits(weights, model, ids).flatten(0, 1)
    losses = F.cross_entropy(rows, labels.flatten(), reduction="none")
    return (losses * token_weights.flatten()).sum()


def leaves(weights: Weights) -> dict[str, Tensor]:
    """Return copies of the weights that collect gradients."""
    return {name: value.clone().requires_grad_() for name, value in weights.items()}
