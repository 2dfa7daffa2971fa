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
class Question:
    """Token ids [b, s]; their types [b, s], where the model has any; whether it has a head for the
    order of two segments, or, in place of all others, one that `classifies`: then there are scores
    [b, n] of whole sequences."""

    ids: Tensor
    types: Tensor | None = None
    order: bool = False
    classifies: bool = False


def gpt2(config: Json, get: Get, asked: Question) -> tuple[Tensor]:
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
    x, tied = norm("ln_f", x), config.get("tie_word_embeddings", True)
    if asked.classifies:
        return (x[:, -1] @ get("score.weight").t(),)
    return (x @ get("wte.weight" if tied else "lm_head.weight").t(),)


def decoder(config: Json, get: Get, asked: Question) -> tuple[Tensor]:
    """Logits [b, s, V] of LLaMA (Touvron et al. 2023), Mistral (Jiang et al. 2023), Qwen 2 and 3
    (Yang et al. 2024, 2025) and Gemma 2 (Gemma Team 2024)."""
    kind, eps = config["model_type"], config.get("rms_norm_eps", 1e-6)
    gemma = kind == "gemma2"
    table = get("embed_tokens.weight")

    def norm(name: str, x: Tensor) -> Tensor:
        gain = get(f"{name}.weight") + (1.0 if gemma else 0.0)
        return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * gain

    x = table[asked.ids] * (table.shape[1] ** 0.5 if gemma else 1.0)
    for i in range(config["num_hidden_layers"]):
        layer = f"layers.{i}"
        y = _self_attention(config, get, norm, i, norm(f"{layer}.input_layernorm", x))
        x = x + (norm(f"{layer}.post_attention_layernorm", y) if gemma else y)
        before = "pre_feedforward" if gemma else "post_attention"
        y = _gated_mlp(config, get, f"{layer}.mlp", norm(f"{layer}.{before}_layernorm", x))
        x = x + (norm(f"{layer}.post_feedforward_layernorm", y) if gemma else y)
    x, tied = norm("norm", x), config.get("tie_word_embeddings", gemma)
    if asked.classifies:
        return (x[:, -1] @ get("score.weight").t(),)
    logits = x @ (table if tied else get("lm_head.weight")).t()
    cap = config.get("final_logit_softcapping", 30.0) if gemma else None
    return (logits if cap is None else cap * torch.tanh(logits / cap),)


def _self_attention(
    config: Json, get: Get, norm: Callable[[str, Tensor], Tensor], layer: int, x: Tensor
) -> Tensor:
    """Attention of layer `layer` of a `decoder` on its normed input [b, s, h]."""
    kind, name = config["model_type"], f"layers.{layer}.self_attn"
    heads = config["num_attention_heads"]
    grouped = {"mistral": 8, "qwen2": 32, "qwen3": 32, "gemma2": 4}  # where config.json lacks it
    kv_heads = config.get("num_key_value_heads", grouped.get(kind)) or heads
    biased = kind == "qwen2" or config.get("attention_bias", False)

    def linear(part: str, x: Tensor, bias: bool) -> Tensor:
        y = x @ get(f"{name}.{part}_proj.weight").t()
        return y + get(f"{name}.{part}_proj.bias") if bias else y

    q, k, v = (linear(part, x, biased) for part in "qkv")
    if kind == "qwen3":
        size = q.shape[-1] // heads
        q = norm(f"{name}.q_norm", q.unflatten(-1, (-1, size))).flatten(2)
        k = norm(f"{name}.k_norm", k.unflatten(-1, (-1, size))).flatten(2)
    q, k = _rotated(config, q, heads), _rotated(config, k, kv_heads)
    scalar = cap = None
    if kind == "gemma2":
        scalar = config.get("query_pre_attn_scalar", 256)
        cap = config.get("attn_logit_softcapping", 50.0)
    form = AttentionForm(True, _window(config, layer), scalar, cap)
    out = _attention(q, k, v, heads, kv_heads, form)
    return linear("o", out, biased and kind != "qwen2")


def _window(config: Json, layer: int) -> int | None:
    """How many keys a query of this layer sees at most; None: all before it."""
    kind = config["model_type"]
    if kind == "llama":
        return None
    window = config.get("sliding_window", 4096)
    if kind == "mistral":
        return window
    types = config.get("layer_types")
    if types:
        return window if types[layer] == "sliding_attention" else None
    if kind == "gemma2":
        return window if layer % 2 == 0 else None
    slides = config.get("use_sliding_window") and layer >= config.get("max_window_layers", 28)
    return window if slides else None


def _gated_mlp(config: Json, get: Get, name: str, x: Tensor) -> Tensor:
    def linear(part: str, x: Tensor) -> Tensor:
        y = x @ get(f"{name}.{part}_proj.weight").t()
        return y + get(f"{name}.{part}_proj.bias") if config.get("mlp_bias") else y

    gate = linear("gate", x)
    opened = _gelu(gate, "tanh") if config["model_type"] == "gemma2" else gate * gate.sigmoid()
    return linear("down", opened * linear("up", x))


def bert(config: Json, get: Get, asked: Question) -> tuple[Tensor, ...]:
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
        x = x + linear(
            f"{name}.attention.output.dense",
            _attention(q, k, v, heads, heads, AttentionForm(causal=False)),
        )
        x = x if front else norm(f"{name}.attention.output.LayerNorm", x)
        y = norm(f"{name}.ln", x) if front else x
        y = _gelu(linear(f"{name}.intermediate.dense", y), activation)
        x = x + linear(f"{name}.output.dense", y)
        x = x if front else norm(f"{name}.output.LayerNorm", x)
    x = norm("encoder.ln", x) if front else x
    if asked.classifies:
        return (linear("classifier", torch.tanh(linear("pooler.dense", x[:, 0]))),)
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
    frequencies = 1.0 / theta ** (torch.arange(half) / half)
    scaling = config.get("rope_scaling") or rope
    if scaling.get("rope_type", scaling.get("type")) == "llama3":
        frequencies = torch.stack([_slower(one, scaling, config) for one in frequencies])
    turns = torch.arange(x.shape[1])[:, None] * frequencies
    turned = torch.complex(real, imaginary) * torch.exp(1j * turns.to(x.dtype))[:, None, :]
    return torch.cat((turned.real, turned.imag), dim=-1).flatten(2)


def _slower(frequency: Tensor, scaling: Json, config: Json) -> Tensor:
    """As Llama 3.1 has it: long waves are longer by `factor`, short ones stay."""
    whole = config.get("max_position_embeddings")
    length = scaling.get("original_max_position_embeddings", whole)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    wave = 2 * math.pi / frequency
    if wave < length / high:
        return frequency
    if wave > length / low:
        return frequency / scaling["factor"]
    share = (length / wave - low) / (high - low)
    return (1 - share) * frequency / scaling["factor"] + share * frequency


@dataclass(frozen=True)
class AttentionForm:
    """What attention looks at; scores are divided by the root of `scalar` (None: the size of a
    head) and capped at `cap`."""

    causal: bool = True
    window: int | None = None
    scalar: float | None = None
    cap: float | None = None


def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    heads: int,
    kv_heads: int,
    form: AttentionForm = AttentionForm(),
) -> Tensor:
    """[b, s, heads * head size]; each key head serves heads / kv_heads query heads."""
    q = q.unflatten(-1, (heads, -1)).transpose(1, 2)
    k, v = (x.unflatten(-1, (kv_heads, -1)).transpose(1, 2) for x in (k, v))
    k, v = (x.repeat_interleave(heads // kv_heads, dim=1) for x in (k, v))
    scores = q @ k.transpose(-1, -2) / math.sqrt(form.scalar or q.shape[-1])
    if form.cap is not None:
        scores = form.cap * torch.tanh(scores / form.cap)
    seen = torch.ones(scores.shape[-2:], dtype=torch.bool)
    if form.causal:
        seen = seen.tril()
    if form.window is not None:
        seen = seen & seen.triu(1 - form.window)
    weights = torch.softmax(scores.masked_fill(~seen, -torch.inf), dim=-1)
    return (weights @ v).transpose(1, 2).flatten(2)


FORWARD = {
    "gpt2": gpt2,
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "gemma2"), decoder),
    "bert": bert,
    "megatron-bert": bert,
}
