"""Independent forward passes of each family, for the self-check of a conversion.

The passes follow Hugging Face's definition of each family: the tensor names, the tensor layouts,
and the keys of config.json. The reference passes share no code with ptdmpi's model or with the
tables of `families.py`, so they cannot repeat a mistake in that code. One tensor is read at a time.
The tests compare these passes with `transformers`.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ptdmpi.convert.deepseek.reference import expert_shares, latent_attention

# a function that returns the tensor with a given name; the name has no prefix such as "model."
Get = Callable[[str], Tensor]
Json = Mapping[str, Any]


@dataclass(frozen=True)
class Question:
    """The input of a forward pass, and the heads to compute.

    `ids` are token ids [prompts, tokens], and `types` are the token types of the same shape if the
    model has any. If `order` is True, the model has a second head, for the order of two segments.
    If `classifies` is True, the model has only a head for a task, which computes scores [prompts,
    classes] of whole sequences. `ahead` is the number of modules for multi-token prediction, whose
    logits follow those of the model.
    """

    ids: Tensor
    types: Tensor | None = None
    order: bool = False
    classifies: bool = False
    ahead: int = 0


def gpt2(config: Json, get: Get, question: Question) -> tuple[Tensor]:
    """Return the logits [prompts, tokens, vocabulary] of GPT-2 (Radford et al. 2019), or the scores
    of a task's head."""
    ids = question.ids
    eps = config.get("layer_norm_epsilon", 1e-5)
    heads = config["n_head"]
    width = config["n_embd"]

    def norm(name: str, x: Tensor) -> Tensor:
        """Apply the LayerNorm `name`."""
        return _layer_norm(get, name, x, eps)

    def conv(name: str, x: Tensor) -> Tensor:
        """Apply the linear layer `name`, whose weight is [inputs, outputs]."""
        return x @ get(f"{name}.weight") + get(f"{name}.bias")

    x = get("wte.weight")[ids] + get("wpe.weight")[: ids.shape[1]]
    for i in range(config["n_layer"]):
        q, k, v = conv(f"h.{i}.attn.c_attn", norm(f"h.{i}.ln_1", x)).split(width, dim=-1)
        x = x + conv(f"h.{i}.attn.c_proj", _attention(q, k, v, heads=heads, kv_heads=heads))
        y = conv(f"h.{i}.mlp.c_fc", norm(f"h.{i}.ln_2", x))
        y = _gelu(y, config.get("activation_function", "gelu_new"))
        x = x + conv(f"h.{i}.mlp.c_proj", y)
    x = norm("ln_f", x)
    if question.classifies:
        return (x[:, -1] @ get("score.weight").t(),)
    tied = config.get("tie_word_embeddings", True)
    return (x @ get("wte.weight" if tied else "lm_head.weight").t(),)


def decoder(config: Json, get: Get, question: Question) -> tuple[Tensor, ...]:
    """Return the logits [prompts, tokens, vocabulary], or the scores of a task's head, of LLaMA
    (Touvron et al. 2023), Mistral (Jiang et al. 2023), Mixtral (2024), Qwen 2 and 3 (Yang et al.
    2024, 2025), OLMoE (Muennighoff et al. 2024), Gemma 2 (Gemma Team 2024) and DeepSeek-V3
    (DeepSeek-AI 2024). The logits of modules for multi-token prediction follow those of the
    model."""
    eps = config.get("rms_norm_eps", 1e-6)
    gemma = config["model_type"] == "gemma2"
    table = get("embed_tokens.weight")

    def norm(name: str, x: Tensor) -> Tensor:
        """Apply the RMSNorm `name`. Gemma stores the gain minus one."""
        gain = get(f"{name}.weight")
        if gemma:
            gain = gain + 1.0
        return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * gain

    x = table[question.ids]
    if gemma:
        x = x * table.shape[1] ** 0.5
    layers = config["num_hidden_layers"]
    for i in range(layers):
        x = _decoder_layer(config, get, norm, layer=i, x=x)
    x = norm("norm", x)
    if question.classifies:
        return (x[:, -1] @ get("score.weight").t(),)
    if not config.get("tie_word_embeddings", gemma):
        table = get("lm_head.weight")
    logits = x @ table.t()
    if gemma:
        logits = _capped(logits, config.get("final_logit_softcapping", 30.0))
    predicted = [logits]
    for i in range(layers, layers + question.ahead):
        # At position j, module k (from 0) gets the embedding of token j + k + 1. If the prompt has
        # no such token, the module gets the embedding of token id 0.
        shift = i - layers + 1
        ids = torch.nn.functional.pad(question.ids[:, shift:], (0, shift))
        embedded = get(f"layers.{i}.embed_tokens.weight")[ids]
        both = (norm(f"layers.{i}.enorm", embedded), norm(f"layers.{i}.hnorm", x))
        x = _linear(get, f"layers.{i}.eh_proj", torch.cat(both, -1), bias=False)
        x = _decoder_layer(config, get, norm, layer=i, x=x)
        x = norm(f"layers.{i}.shared_head.norm", x)
        predicted.append(_linear(get, f"layers.{i}.shared_head.head", x, bias=False))
    return tuple(predicted)


def _decoder_layer(
    config: Json, get: Get, norm: Callable[[str, Tensor], Tensor], *, layer: int, x: Tensor
) -> Tensor:
    """Return the output of layer `layer` of a `decoder` for the input `x` [prompts, tokens,
    hidden]."""
    name = f"layers.{layer}"
    normed = norm(f"{name}.input_layernorm", x)
    y = _self_attention(config, get, norm, layer=layer, x=normed)
    if config["model_type"] == "gemma2":  # a norm before and a norm after each attention and MLP
        x = x + norm(f"{name}.post_attention_layernorm", y)
        normed = norm(f"{name}.pre_feedforward_layernorm", x)
        y = _gated_mlp(config, get, f"{name}.mlp", normed)
        return x + norm(f"{name}.post_feedforward_layernorm", y)
    x = x + y
    normed = norm(f"{name}.post_attention_layernorm", x)
    mlp = _mixture if _has_experts(config, layer) else _gated_mlp
    return x + mlp(config, get, f"{name}.mlp", normed)


def _capped(x: Tensor, cap: float | None) -> Tensor:
    """Limit values smoothly to the range from -`cap` to `cap`; None means no limit."""
    if cap is None:
        return x
    return cap * torch.tanh(x / cap)


def _self_attention(
    config: Json, get: Get, norm: Callable[[str, Tensor], Tensor], *, layer: int, x: Tensor
) -> Tensor:
    """Return the output of the attention in layer `layer` of a `decoder`, for the normalized input
    `x` [prompts, tokens, hidden]."""
    kind = config["model_type"]
    name = f"layers.{layer}.self_attn"
    if kind == "deepseek_v3":
        return latent_attention(config, get, norm, partial(_rotated, config), name=name, x=x)
    heads = config["num_attention_heads"]
    # the default numbers of key heads in `transformers`
    grouped = {"mistral": 8, "mixtral": 8, "qwen2": 32, "qwen3": 32, "qwen3_moe": 4, "gemma2": 4}
    kv_heads = config.get("num_key_value_heads", grouped.get(kind)) or heads
    biased = kind == "qwen2" or config.get("attention_bias", False)

    def linear(part: str, x: Tensor, bias: bool) -> Tensor:
        """Apply the linear layer `part` (q, k, v or o) of the attention."""
        return _linear(get, f"{name}.{part}_proj", x, bias)

    q = linear("q", x, biased)
    k = linear("k", x, biased)
    v = linear("v", x, biased)
    if kind in ("qwen3", "qwen3_moe"):
        size = q.shape[-1] // heads
        q = norm(f"{name}.q_norm", q.unflatten(-1, (-1, size))).flatten(2)
        k = norm(f"{name}.k_norm", k.unflatten(-1, (-1, size))).flatten(2)
    if kind == "olmoe":  # OLMoE normalizes all heads together
        q, k = norm(f"{name}.q_norm", q), norm(f"{name}.k_norm", k)
    q = _rotated(config, q, heads)
    k = _rotated(config, k, kv_heads)
    scalar = cap = None
    if kind == "gemma2":
        scalar = config.get("query_pre_attn_scalar", 256)
        cap = config.get("attn_logit_softcapping", 50.0)
    form = AttentionForm(True, _window(config, layer), scalar, cap)
    out = _attention(q, k, v, heads=heads, kv_heads=kv_heads, form=form)
    return linear("o", out, biased and kind != "qwen2")


def _linear(get: Get, name: str, x: Tensor, bias: bool = True) -> Tensor:
    """Apply the linear layer `name`, whose weight is [outputs, inputs]."""
    y = x @ get(f"{name}.weight").t()
    if bias:
        y = y + get(f"{name}.bias")
    return y


def _window(config: Json, layer: int) -> int | None:
    """Return the maximum number of keys that a query of this layer attends to; None means all keys
    up to the query's position."""
    kind = config["model_type"]
    types = config.get("layer_types")
    if kind == "llama":
        slides = False
    elif kind == "mistral":
        slides = True
    elif kind == "mixtral":  # for this family, in contrast to Mistral, the window has no default
        return config.get("sliding_window")
    elif types:
        slides = types[layer] == "sliding_attention"
    elif kind == "gemma2":
        slides = layer % 2 == 0
    else:
        first = config.get("max_window_layers", 28)
        slides = bool(config.get("use_sliding_window")) and layer >= first
    if not slides:
        return None
    return config.get("sliding_window", 4096)


def _gated_mlp(config: Json, get: Get, name: str, x: Tensor) -> Tensor:
    """Return the output of the MLP of a `decoder` for the normalized input `x` [prompts, tokens,
    hidden]."""
    bias = bool(config.get("mlp_bias"))
    gate = _linear(get, f"{name}.gate_proj", x, bias)
    opened = _gelu(gate, "tanh") if config["model_type"] == "gemma2" else gate * gate.sigmoid()
    inner = opened * _linear(get, f"{name}.up_proj", x, bias)
    return _linear(get, f"{name}.down_proj", inner, bias)


def _has_experts(config: Json, layer: int) -> bool:
    """Return True if layer number `layer` has experts."""
    if config["model_type"] == "deepseek_v3":
        return layer >= config["first_k_dense_replace"]
    if not config.get("num_local_experts", config.get("num_experts")):
        return False
    every = config.get("decoder_sparse_step", 1)
    return layer not in config.get("mlp_only_layers", []) and (layer + 1) % every == 0


def _mixture(config: Json, get: Get, name: str, x: Tensor) -> Tensor:
    """Return for each token the weighted sum of its experts' outputs (Jiang et al. 2024, arXiv
    2401.04088, section 2.1). For simplicity, every expert processes all tokens, including the
    tokens for which the router does not choose the expert."""
    normalizes = config.get("norm_topk_prob", False)
    linears = ("gate_proj", "down_proj", "up_proj")
    if config["model_type"] == "mixtral":
        name = name.replace(".mlp", ".block_sparse_moe")
        normalizes = True
        linears = ("w1", "w2", "w3")
    y = torch.zeros_like(x)
    if config["model_type"] == "deepseek_v3":
        shares = expert_shares(config, get, name, x)
        if config["n_shared_experts"]:
            y = _gated_mlp(config, get, f"{name}.shared_experts", x)
    else:
        shares = _linear(get, f"{name}.gate", x, False).softmax(-1)
        least = shares.topk(config["num_experts_per_tok"]).values[..., -1:]
        shares = shares * (shares >= least)
        if normalizes:
            shares = shares / shares.sum(-1, keepdim=True)
    for number in range(shares.shape[-1]):
        w1, w2, w3 = (get(f"{name}.experts.{number}.{each}.weight") for each in linears)
        gate = x @ w1.t()
        y += shares[..., number, None] * ((gate * gate.sigmoid() * (x @ w3.t())) @ w2.t())
    return y


def bert(config: Json, get: Get, question: Question) -> tuple[Tensor, ...]:
    """Return the logits [prompts, tokens, vocabulary] of BERT, and the logits [prompts, 2] of the
    head for the order of two segments if there is one. A model with a task's head returns only the
    scores of this head. BERT has norms after the blocks (Devlin et al. 2019). Megatron's BERT has
    norms before the blocks (Shoeybi et al. 2019)."""
    x = _bert_body(config, get, question)
    if question.classifies:
        return (_pooled(get, "classifier", x),)
    head = "cls.predictions"
    y = _linear(get, f"{head}.transform.dense", x)
    y = _gelu(y, config.get("hidden_act", "gelu"))
    y = _layer_norm(get, f"{head}.transform.LayerNorm", y, config.get("layer_norm_eps", 1e-12))
    if config.get("tie_word_embeddings", True):
        logits = y @ get("embeddings.word_embeddings.weight").t() + get(f"{head}.bias")
    else:
        logits = _linear(get, f"{head}.decoder", y)
    if not question.order:
        return (logits,)
    return logits, _pooled(get, "cls.seq_relationship", x)


def _pooled(get: Get, name: str, x: Tensor) -> Tensor:
    """Apply the pooler, and then the linear layer `name`, to the first token."""
    return _linear(get, name, torch.tanh(_linear(get, "pooler.dense", x[:, 0])))


def _bert_body(config: Json, get: Get, question: Question) -> Tensor:
    """Return the hidden states [prompts, tokens, hidden] of a BERT model after its last layer."""
    before = config["model_type"] == "megatron-bert"
    heads = config["num_attention_heads"]
    eps = config.get("layer_norm_eps", 1e-12)
    activation = config.get("hidden_act", "gelu")

    def norm(name: str, x: Tensor) -> Tensor:
        """Apply the LayerNorm `name`."""
        return _layer_norm(get, name, x, eps)

    def attention(name: str, x: Tensor) -> Tensor:
        """Apply the attention of a layer."""
        q = _linear(get, f"{name}.self.query", x)
        k = _linear(get, f"{name}.self.key", x)
        v = _linear(get, f"{name}.self.value", x)
        form = AttentionForm(causal=False)
        out = _attention(q, k, v, heads=heads, kv_heads=heads, form=form)
        return _linear(get, f"{name}.output.dense", out)

    def mlp(name: str, x: Tensor) -> Tensor:
        """Apply the MLP of a layer."""
        y = _gelu(_linear(get, f"{name}.intermediate.dense", x), activation)
        return _linear(get, f"{name}.output.dense", y)

    x = get("embeddings.word_embeddings.weight")[question.ids]
    x = x + get("embeddings.position_embeddings.weight")[: x.shape[1]]
    x = x + get("embeddings.token_type_embeddings.weight")[question.types]
    if not before:
        x = norm("embeddings.LayerNorm", x)
    for i in range(config["num_hidden_layers"]):
        name = f"encoder.layer.{i}"
        if before:
            x = x + attention(f"{name}.attention", norm(f"{name}.attention.ln", x))
            x = x + mlp(name, norm(f"{name}.ln", x))
        else:
            x = x + attention(f"{name}.attention", x)
            x = norm(f"{name}.attention.output.LayerNorm", x)
            x = norm(f"{name}.output.LayerNorm", x + mlp(name, x))
    if before:
        x = norm("encoder.ln", x)
    return x


def _layer_norm(get: Get, name: str, x: Tensor, eps: float) -> Tensor:
    """Apply a LayerNorm over the last dimension."""
    centred = x - x.mean(-1, keepdim=True)
    deviation = (centred.square().mean(-1, keepdim=True) + eps).sqrt()
    return centred / deviation * get(f"{name}.weight") + get(f"{name}.bias")


def _gelu(x: Tensor, form: str) -> Tensor:
    """Apply GELU: the exact function for "gelu", otherwise its approximation by tanh."""
    if form == "gelu":
        return 0.5 * x * (1.0 + torch.erf(x / math.sqrt(2.0)))
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)))


def _rotated(config: Json, x: Tensor, heads: int) -> Tensor:
    """Apply RoPE to `x` [prompts, tokens, heads * head size], as rotations of complex numbers. The
    first half of a head has the real parts of the complex numbers, and the second half has the
    imaginary parts."""
    rope = config.get("rope_parameters") or {}
    theta = rope.get("rope_theta", config.get("rope_theta", 10000.0))
    real, imaginary = x.unflatten(-1, (heads, -1)).chunk(2, dim=-1)
    half = real.shape[-1]
    # the table is float32, as in `transformers` and ptdmpi, because a more precise table would have
    # slightly different angles
    frequencies = 1.0 / theta ** (torch.arange(half) / half)
    scaling = config.get("rope_scaling") or rope
    kind, length = scaling.get("rope_type", scaling.get("type")), 1.0
    if kind == "llama3":
        frequencies = torch.stack([_slower(value, scaling, config) for value in frequencies])
    elif kind == "yarn":
        frequencies = _slower_by_number(frequencies, scaling, config, base=theta)
        length = _yarn_length(scaling)
    turns = torch.arange(x.shape[1])[:, None] * frequencies
    turned = length * torch.complex(real, imaginary) * torch.exp(1j * turns.to(x.dtype))[:, None, :]
    return torch.cat((turned.real, turned.imag), dim=-1).flatten(2)


def _slower(frequency: Tensor, scaling: Json, config: Json) -> Tensor:
    """Return a rotary frequency after the scaling of Llama 3.1. The frequency is divided by
    `factor` for long wavelengths, and unchanged for short wavelengths. In between there is a smooth
    transition."""
    whole = config.get("max_position_embeddings")
    length = scaling.get("original_max_position_embeddings", whole)
    low = scaling["low_freq_factor"]
    high = scaling["high_freq_factor"]
    wave = 2 * math.pi / frequency
    if wave < length / high:
        return frequency
    if wave > length / low:
        return frequency / scaling["factor"]
    share = (length / wave - low) / (high - low)
    return (1 - share) * frequency / scaling["factor"] + share * frequency


def _slower_by_number(frequencies: Tensor, scaling: Json, config: Json, *, base: Any) -> Tensor:
    """Return rotary frequencies after the scaling of YaRN. The frequencies below a first index are
    unchanged, and the frequencies above a last index are divided by `factor`. Between the first and
    the last index there is a linear transition. `base` is rope_theta."""
    whole = config.get("max_position_embeddings")
    length = scaling.get("original_max_position_embeddings", whole)
    half = len(frequencies)
    fast, slow = (scaling.get(key) for key in ("beta_fast", "beta_slow"))
    # the equation base^(-n / half) = 2 pi turns / length, solved for the index n
    first, last = (
        half * math.log(length / (2 * math.pi * turns), base) for turns in (fast or 32, slow or 1)
    )
    first = max(math.floor(first), 0)
    last = min(math.ceil(last), 2 * half - 1)
    scaled = [
        frequency / scaling["factor"] * share + frequency * (1 - share)
        for number, frequency in enumerate(frequencies)
        for share in [min(1.0, max(0.0, (number - first) / max(last - first, 1e-3)))]
    ]
    return torch.stack(scaled)


def _yarn_length(scaling: Json) -> float:
    """Return the factor by which YaRN multiplies rotated queries and keys."""
    growth = 0.1 * math.log(max(scaling["factor"], 1.0))
    if scaling.get("attention_factor") is not None:
        return float(scaling["attention_factor"])
    some, every = scaling.get("mscale"), scaling.get("mscale_all_dim")
    if some and every:
        return (some * growth + 1) / (every * growth + 1)
    return growth + 1


@dataclass(frozen=True)
class AttentionForm:
    """The mask of an attention, and the scaling of its scores.

    If `causal` is True, a query attends to the keys up to its own position. If `window` is given, a
    query attends to at most the last `window` of these keys. Scores are divided by the square root
    of `scalar` (None: the size of a head) and limited by `cap` (None: no limit).
    """

    causal: bool = True
    window: int | None = None
    scalar: float | None = None
    cap: float | None = None


def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    heads: int,
    kv_heads: int,
    form: AttentionForm = AttentionForm(),
) -> Tensor:
    """Return the output of an attention, [prompts, tokens, heads * head size], for queries `q` of
    the same shape, and for keys `k` and values `v` [prompts, tokens, kv_heads * head size]. Each
    key head serves heads / kv_heads query heads."""
    q = q.unflatten(-1, (heads, -1)).transpose(1, 2)
    k = k.unflatten(-1, (kv_heads, -1)).transpose(1, 2)
    v = v.unflatten(-1, (kv_heads, -1)).transpose(1, 2)
    k = k.repeat_interleave(heads // kv_heads, dim=1)
    v = v.repeat_interleave(heads // kv_heads, dim=1)
    scores = q @ k.transpose(-1, -2) / math.sqrt(form.scalar or q.shape[-1])
    scores = _capped(scores, form.cap)
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
    **dict.fromkeys(
        ("mixtral", "qwen3_moe", "olmoe", "deepseek_v3"), decoder
    ),  # the decoders with experts
    "bert": bert,
    "megatron-bert": bert,
}
