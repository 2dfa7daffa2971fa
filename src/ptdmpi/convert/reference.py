"""Forward passes written a second time, for the self-check of a conversion.

They follow Hugging Face's definition of each family: its names, its layouts, the keys of its
config.json. Nothing here is shared with the model that is trained or with the tables of
`families.py`, so a mistake there cannot hide here. One tensor is read at a time. The tests hold
these passes against `transformers`.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Get = Callable[[str], Tensor]  # their name, without the base model's prefix -> tensor
Json = Mapping[str, Any]


@dataclass(frozen=True)
class Asked:
    """Token ids [b, s]; their types [b, s], where the model has any; whether it has a head for the
    order of two segments."""

    ids: Tensor
    types: Tensor | None = None
    order: bool = False


def gpt2(config: Json, get: Get, asked: Asked) -> tuple[Tensor]:
    """Logits [b, s, V]. Radford et al. 2019."""
    eps, ids = config.get("layer_norm_epsilon", 1e-5), asked.ids
    heads, width = config["n_head"], config["n_embd"]

    def norm(name: str, x: Tensor) -> Tensor:
        return _layer_norm(get, name, x, eps)

    def conv(name: str, x: Tensor) -> Tensor:
        return x @ get(f"{name}.weight") + get(f"{name}.bias")

    x = get("wte.weight")[ids] + get("wpe.weight")[: ids.shape[1]]
    for i in range(config["n_layer"]):
        q, k, v = conv(f"h.{i}.attn.c_attn", norm(f"h.{i}.ln_1", x)).split(width, dim=-1)
        x = x + conv(f"h.{i}.attn.c_proj", _attention(q, k, v, heads, heads))
        y = conv(f"h.{i}.mlp.c_fc", norm(f"h.{i}.ln_2", x))
        y = _gelu(y, config.get("activation_function", "gelu_new"))
        x = x + conv(f"h.{i}.mlp.c_proj", y)
    tied = config.get("tie_word_embeddings", True)
    return (norm("ln_f", x) @ get("wte.weight" if tied else "lm_head.weight").t(),)


def llama(config: Json, get: Get, asked: Asked) -> tuple[Tensor]:
    """Logits [b, s, V]. Touvron et al. 2023."""
    eps, heads = config.get("rms_norm_eps", 1e-6), config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads

    def norm(name: str, x: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * get(f"{name}.weight")

    def linear(name: str, x: Tensor, bias: str) -> Tensor:
        y = x @ get(f"{name}.weight").t()
        return y + get(f"{name}.bias") if config.get(bias) else y

    x = get("embed_tokens.weight")[asked.ids]
    for i in range(config["num_hidden_layers"]):
        name = f"layers.{i}.self_attn"
        y = norm(f"layers.{i}.input_layernorm", x)
        q, k, v = (linear(f"{name}.{part}_proj", y, "attention_bias") for part in "qkv")
        q, k = _rotated(config, q, heads), _rotated(config, k, kv_heads)
        x = x + linear(f"{name}.o_proj", _attention(q, k, v, heads, kv_heads), "attention_bias")
        y = norm(f"layers.{i}.post_attention_layernorm", x)
        name = f"layers.{i}.mlp"
        gate = linear(f"{name}.gate_proj", y, "mlp_bias")
        y = gate * torch.sigmoid(gate) * linear(f"{name}.up_proj", y, "mlp_bias")
        x = x + linear(f"{name}.down_proj", y, "mlp_bias")
    tied = config.get("tie_word_embeddings", False)
    return (norm("norm", x) @ get("embed_tokens.weight" if tied else "lm_head.weight").t(),)


def bert(config: Json, get: Get, asked: Asked) -> tuple[Tensor, ...]:
    """Logits [b, s, V], and of a second head [b, 2]. Devlin et al. 2019; with norms in front of the
    blocks: Shoeybi et al. 2019."""
    front = config["model_type"] == "megatron-bert"
    heads, eps = config["num_attention_heads"], config.get("layer_norm_eps", 1e-12)
    activation = config.get("hidden_act", "gelu")

    def norm(name: str, x: Tensor) -> Tensor:
        return _layer_norm(get, name, x, eps)

    def linear(name: str, x: Tensor) -> Tensor:
        return x @ get(f"{name}.weight").t() + get(f"{name}.bias")

    x = get("embeddings.word_embeddings.weight")[asked.ids]
    x = x + get("embeddings.position_embeddings.weight")[: x.shape[1]]
    x = x + get("embeddings.token_type_embeddings.weight")[asked.types]
    x = x if front else norm("embeddings.LayerNorm", x)
    for i in range(config["num_hidden_layers"]):
        name = f"encoder.layer.{i}"
        y = norm(f"{name}.attention.ln", x) if front else x
        q, k, v = (linear(f"{name}.attention.self.{n}", y) for n in ("query", "key", "value"))
        x = x + linear(f"{name}.attention.output.dense", _attention(q, k, v, heads, heads, False))
        x = x if front else norm(f"{name}.attention.output.LayerNorm", x)
        y = norm(f"{name}.ln", x) if front else x
        y = _gelu(linear(f"{name}.intermediate.dense", y), activation)
        x = x + linear(f"{name}.output.dense", y)
        x = x if front else norm(f"{name}.output.LayerNorm", x)
    x = norm("encoder.ln", x) if front else x
    head = "cls.predictions"
    y = _gelu(linear(f"{head}.transform.dense", x), activation)
    y = norm(f"{head}.transform.LayerNorm", y)
    tied = config.get("tie_word_embeddings", True)
    table = get("embeddings.word_embeddings.weight" if tied else f"{head}.decoder.weight")
    logits = y @ table.t() + get(f"{head}.bias" if tied else f"{head}.decoder.bias")
    if not asked.order:
        return (logits,)
    return logits, linear("cls.seq_relationship", torch.tanh(linear("pooler.dense", x[:, 0])))


def _layer_norm(get: Get, name: str, x: Tensor, eps: float) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    deviation = (centred.square().mean(-1, keepdim=True) + eps).sqrt()
    return centred / deviation * get(f"{name}.weight") + get(f"{name}.bias")


def _gelu(x: Tensor, form: str) -> Tensor:
    if form == "gelu":
        return 0.5 * x * (1.0 + torch.erf(x / math.sqrt(2.0)))
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)))


def _rotated(config: Json, x: Tensor, heads: int) -> Tensor:
    """RoPE as complex numbers whose real parts are the first half of a head."""
    rope = config.get("rope_parameters") or {}
    theta = rope.get("rope_theta", config.get("rope_theta", 10000.0))
    real, imaginary = x.unflatten(-1, (heads, -1)).chunk(2, dim=-1)
    half = real.shape[-1]
    # float32 as in `transformers` and here: neither table is better
    turns = torch.arange(x.shape[1])[:, None] * (1.0 / theta ** (torch.arange(half) / half))
    turned = torch.complex(real, imaginary) * torch.exp(1j * turns.to(x.dtype))[:, None, :]
    return torch.cat((turned.real, turned.imag), dim=-1).flatten(2)


def _attention(
    q: Tensor, k: Tensor, v: Tensor, heads: int, kv_heads: int, causal: bool = True
) -> Tensor:
    """[b, s, heads * head size]; each key head serves heads / kv_heads query heads."""
    q = q.unflatten(-1, (heads, -1)).transpose(1, 2)
    k, v = (x.unflatten(-1, (kv_heads, -1)).transpose(1, 2) for x in (k, v))
    k, v = (x.repeat_interleave(heads // kv_heads, dim=1) for x in (k, v))
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    if causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        scores = scores.masked_fill(~seen, -torch.inf)
    weights = torch.softmax(scores, dim=-1)
    return (weights @ v).transpose(1, 2).flatten(2)


FORWARD = {"gpt2": gpt2, "llama": llama, "bert": bert, "megatron-bert": bert}
