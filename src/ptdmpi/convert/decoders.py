"""Descriptions of LLaMA and related decoders in Hugging Face's format: LLaMA, Mistral, Mixtral,
Qwen 2 and 3 (with or without experts), OLMoE, and Gemma 2.

The decoder families share nearly all names of parameters, and most keys of config.json. A `Decoder`
describes how one family differs from the others.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from ptdmpi.config import InputError, ModelConfig
from ptdmpi.convert.family import DECODER, PLAIN, ConfigJson, Family, require
from ptdmpi.convert.rope import rope_config, rope_keys
from ptdmpi.convert.windows import layer_count, layer_types, require_whole, window_keys

MODULES = {
    "embedding.word": ("embed_tokens",),
    "layers.{i}.attention_norm": ("layers.{i}.input_layernorm",),
    "layers.{i}.attention.qkv": tuple(f"layers.{{i}}.self_attn.{x}_proj" for x in "qkv"),
    "layers.{i}.attention.out": ("layers.{i}.self_attn.o_proj",),
    "layers.{i}.mlp_norm": ("layers.{i}.post_attention_layernorm",),
    "layers.{i}.mlp.up": ("layers.{i}.mlp.gate_proj", "layers.{i}.mlp.up_proj"),
    "layers.{i}.mlp.down": ("layers.{i}.mlp.down_proj",),
    "final_norm": ("norm",),
    "head": ("lm_head",),
}
BIASES = {(True, True): True, (True, False): "attention", (False, True): "mlp"}


@dataclass(frozen=True)
class Decoder:
    """A description of one family of decoders: the properties in which it differs from the other
    families.

    `defaults` has the values of keys that are missing in config.json, because `transformers` does
    not write default values. `keys` is a function that makes further keys of [model] from a
    config.json. `config` is a function that makes further keys of config.json from [model].
    `required` has the values that [model] must have in addition to the values that all families
    require. A value None in `required` removes the requirement that all families have for this key.
    """

    model_type: str
    name: str
    defaults: Mapping[str, Any]
    keys: Callable[[ConfigJson], dict[str, Any]]
    config: Callable[[ModelConfig], dict[str, Any]]
    required: Mapping[str, Any]

    def family(self, **modules: tuple[str, ...]) -> Family:
        """Return the `Family` that this object describes. `modules` has additional modules of a
        layer, or new names of known modules."""
        renamed = {
            f"layers.{{i}}.{ours.replace('__', '.')}": theirs for ours, theirs in modules.items()
        }
        return Family(
            model_type=self.model_type,
            prefix="model.",
            modules={**MODULES, **renamed},
            transposed=False,
            buffers=re.compile(r"layers\.\d+\.self_attn\.rotary_emb\.inv_freq"),
            keys=partial(_keys, self),
            config=partial(_config, self),
            tasks={"classification": (f"{self.name}ForSequenceClassification", "score")},
        )


def _keys(decoder: Decoder, config: ConfigJson) -> dict[str, Any]:
    """Return the section [model] of the model that a config.json describes. Raise InputError for
    values that ptdmpi does not support."""
    config = ConfigJson({**decoder.defaults, **config.values}, config.name)
    hidden = config.need("hidden_size")
    heads = config.need("num_attention_heads")
    head_size = {}
    if config.get("head_dim") is not None:
        head_size["head_size"] = config.get("head_dim")
    return {
        "kind": decoder.model_type,
        "layers": config.need("num_hidden_layers"),
        "hidden": hidden,
        "heads": heads,
        "kv_heads": config.get("num_key_value_heads", heads),
        **head_size,
        "ffn_hidden": config.need("intermediate_size"),
        "seq_length": config.need("max_position_embeddings"),
        "norm_eps": config.get("rms_norm_eps", 1e-6),
        **rope_keys(config),
        "tie_embeddings": config.get("tie_word_embeddings", False),
        "sliding_window": 0,
        **decoder.keys(config),
    }


def _config(decoder: Decoder, model: ModelConfig, vocab_size: int) -> dict[str, Any]:
    """Return the config.json for the section [model]. Raise InputError for values that the family
    does not support."""
    needed = {
        **DECODER,
        **PLAIN,
        "norm": "rmsnorm",
        "activation": "swiglu",
        "positions": "rope",
        **decoder.required,
    }
    require(model, decoder.model_type, **{k: v for k, v in needed.items() if v is not None})
    return {
        "architectures": [f"{decoder.name}ForCausalLM"],
        "hidden_act": "silu",
        "vocab_size": vocab_size,
        "num_hidden_layers": model.layers,
        "hidden_size": model.hidden,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_size,
        "intermediate_size": model.ffn_hidden,
        "max_position_embeddings": model.seq_length,
        "rms_norm_eps": model.norm_eps,
        **rope_config(model),
        "tie_word_embeddings": model.tie_embeddings,
        "attention_dropout": model.attention_dropout,
        "initializer_range": model.init_std,
        **decoder.config(model),
    }


# -- LLaMA (Touvron et al. 2023; 3.1 and 3.2: Dubey et al. 2024) -----------------------------------


def _biases(config: ConfigJson) -> dict[str, Any]:
    """Return the key of [model] that says which linear layers have biases."""
    attention = config.only("attention_bias", False, True)
    mlp = config.only("mlp_bias", False, True)
    return {"bias": BIASES.get((attention, mlp), False)}


def _require_attention_bias(model: ModelConfig, family: str) -> None:
    """Raise InputError unless the model has no biases, or biases only in the attention."""
    if model.bias is not False:
        require(model, family, bias="attention")


def _llama_keys(config: ConfigJson) -> dict[str, Any]:
    config.only("hidden_act", "silu", "swish")
    return _biases(config)


def _llama_config(model: ModelConfig) -> dict[str, Any]:
    require(model, "llama", bias="attention" if model.bias == "qkv" else model.bias)
    return {"attention_bias": model.attention_bias, "mlp_bias": model.mlp_bias}


# -- Mistral (Jiang et al. 2023) -------------------------------------------------------------------


def _mistral_keys(config: ConfigJson) -> dict[str, Any]:
    config.only("hidden_act", "silu", "swish")
    window = window_keys(config, [True] * layer_count(config))
    # `transformers` ignores the key layer_types of Mistral models, so all layers have the same
    # window there
    if window.get("sliding_layers", "all") != "all":
        raise InputError(f"{config.name}: layer_types of a mistral must be all of one kind")
    return {**window, "bias": False}


def _mistral_config(model: ModelConfig) -> dict[str, Any]:
    return {"sliding_window": model.sliding_window or None}


# -- Qwen 2 and 3 (Yang et al. 2024, 2025) ---------------------------------------------------------


def _qwen_windows(config: ConfigJson) -> dict[str, Any]:
    first = require_whole(config, "max_window_layers", config.get("max_window_layers", 28))
    if not config.only("use_sliding_window", False, True):
        config = ConfigJson({**config.values, "sliding_window": None}, config.name)
    return window_keys(config, [layer >= first for layer in range(layer_count(config))])


def _qwen2_keys(config: ConfigJson) -> dict[str, Any]:
    config.only("hidden_act", "silu", "swish")
    return {**_qwen_windows(config), "bias": "qkv"}


def _qwen3_keys(config: ConfigJson) -> dict[str, Any]:
    config.only("hidden_act", "silu", "swish")
    return {**_qwen_windows(config), **_biases(config)}


def _qwen_config(model: ModelConfig) -> dict[str, Any]:
    types = layer_types(model)
    full = types.count("full_attention")
    return {
        "use_sliding_window": model.sliding_window > 0,
        "sliding_window": model.sliding_window or None,
        "max_window_layers": full,
        "layer_types": types,
    }


def _qwen3_config(model: ModelConfig) -> dict[str, Any]:
    _require_attention_bias(model, "qwen3")
    return {**_qwen_config(model), "attention_bias": model.attention_bias}


# -- Gemma 2 (Gemma Team 2024) ---------------------------------------------------------------------


def _gemma2_keys(config: ConfigJson) -> dict[str, Any]:
    config.only("hidden_activation", "gelu_pytorch_tanh", "gelu_new")
    config.only("use_bidirectional_attention", False)
    bias = config.only("attention_bias", False, True)
    return {
        **window_keys(config, [layer % 2 == 0 for layer in range(layer_count(config))]),
        "bias": "attention" if bias else False,
        "query_scalar": config.need("query_pre_attn_scalar"),
        # the value null in config.json means no cap; if the key is missing, `defaults` has the
        # value
        "attention_softcap": config.values["attn_logit_softcapping"] or 0.0,
        "logit_softcap": config.values["final_logit_softcapping"] or 0.0,
    }


def _gemma2_config(model: ModelConfig) -> dict[str, Any]:
    _require_attention_bias(model, "gemma2")
    scalar = model.query_scalar or model.head_size
    if scalar == int(scalar):
        scalar = int(scalar)
    return {
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": model.attention_bias,
        "query_pre_attn_scalar": scalar,
        "attn_logit_softcapping": model.attention_softcap or None,
        "final_logit_softcapping": model.logit_softcap or None,
        "sliding_window": model.sliding_window or None,
        "layer_types": layer_types(model),
        # `transformers` would give the embedding of a padding token no gradient
        "pad_token_id": None,
    }


# -- experts (Mixtral: Jiang et al. 2024; Qwen 3: Yang et al. 2025) --------------------------------

# The router settings that Mixtral and Qwen 3 have in common. `balance` is "none", because
# `transformers` does not compute the balance losses of ptdmpi.
ROUTED = {
    "router": "softmax",
    "router_scale": 1.0,
    "router_groups": 1,
    "shared_experts": 0,
    "balance": "none",
}
ALL_MIX = {"dense_layers": 0, "moe_every": 1}  # keys for a model in which all layers have experts


def _expert_keys(config: ConfigJson) -> dict[str, Any]:
    """Return the keys of [model] for experts. Older files of Qwen 3 store the number of experts as
    `num_experts`."""
    count = config.get("num_local_experts", config.get("num_experts"))
    chosen = config.need("num_experts_per_tok")
    return {"experts": count, "experts_per_token": chosen, "balance": "none"}


def _expert_config(model: ModelConfig) -> dict[str, Any]:
    return {"num_local_experts": model.experts, "num_experts_per_tok": model.experts_per_token}


def _mixtral_keys(config: ConfigJson) -> dict[str, Any]:
    return {**_mistral_keys(config), **_expert_keys(config), "kind": "mistral"}


def _mixtral_config(model: ModelConfig) -> dict[str, Any]:
    width = {"intermediate_size": model.expert_hidden}
    return {**_mistral_config(model), **_expert_config(model), **width}


def _dense_layers(config: ConfigJson) -> dict[str, Any]:
    """Return the keys of [model] that say which layers have no experts. Raise InputError if the
    keys of [model] cannot express this choice of layers."""
    every = require_whole(config, "decoder_sparse_step", config.get("decoder_sparse_step", 1))
    dense = config.get("mlp_only_layers", [])
    first = max(dense, default=-1) + 1
    if {*dense} != {*range(first)}:
        raise InputError(
            f"{config.name}: mlp_only_layers = {dense} is not supported; legal: the first layers, "
            "such as [0, 1]"
        )
    return {"dense_layers": first, "moe_every": every}


def _qwen3_moe_keys(config: ConfigJson) -> dict[str, Any]:
    config.only("use_sliding_window", False)
    config.only("hidden_act", "silu", "swish")
    return {
        **_biases(config),
        **_expert_keys(config),
        **_dense_layers(config),
        "kind": "qwen3",
        "expert_hidden": config.need("moe_intermediate_size"),
        "router_normalize": config.only("norm_topk_prob", False, True),
    }


def _qwen3_moe_config(model: ModelConfig) -> dict[str, Any]:
    _require_attention_bias(model, "qwen3_moe")
    return {
        "attention_bias": model.attention_bias,
        "use_sliding_window": False,
        **_expert_config(model),
        "moe_intermediate_size": model.expert_hidden,
        "norm_topk_prob": model.router_normalize,
        "decoder_sparse_step": model.moe_every,
        "mlp_only_layers": [*range(model.dense_layers)],
    }


# -- OLMoE (Muennighoff et al. 2024) ---------------------------------------------------------------


def _olmoe_keys(config: ConfigJson) -> dict[str, Any]:
    config.only("hidden_act", "silu", "swish")
    if config.get("clip_qkv") is not None:
        raise InputError(f"{config.name}: clip_qkv is not supported; legal: null")
    return {
        **_biases(config),
        **_expert_keys(config),
        "kind": "llama",
        "qk_norm": "all",
        "expert_hidden": config.need("intermediate_size"),
        "router_normalize": config.only("norm_topk_prob", False, True),
    }


def _olmoe_config(model: ModelConfig) -> dict[str, Any]:
    _require_attention_bias(model, "olmoe")
    if model.head_size * model.heads != model.hidden:
        require(model, "olmoe", head_size=model.hidden // model.heads)
    return {
        "attention_bias": model.attention_bias,
        "clip_qkv": None,
        **_expert_config(model),
        "intermediate_size": model.expert_hidden,
        "norm_topk_prob": model.router_normalize,
    }


LLAMA = Decoder(
    model_type="llama",
    name="Llama",
    defaults={},
    keys=_llama_keys,
    config=_llama_config,
    required={},
)
MISTRAL = Decoder(
    model_type="mistral",
    name="Mistral",
    defaults={"num_key_value_heads": 8, "sliding_window": 4096},
    keys=_mistral_keys,
    config=_mistral_config,
    required={"bias": False, "sliding_window": None, "sliding_layers": "all"},
)
MIXTRAL = Decoder(
    model_type="mixtral",
    name="Mixtral",
    defaults={"num_key_value_heads": 8, "rms_norm_eps": 1e-5},
    keys=_mixtral_keys,
    config=_mixtral_config,
    required={**MISTRAL.required, **ROUTED, **ALL_MIX, "experts": None, "router_normalize": True},
)
QWEN2 = Decoder(
    model_type="qwen2",
    name="Qwen2",
    defaults={"num_key_value_heads": 32, "sliding_window": 4096},
    keys=_qwen2_keys,
    config=_qwen_config,
    required={"bias": "qkv", "sliding_window": None},
)
QWEN3 = Decoder(
    model_type="qwen3",
    name="Qwen3",
    defaults={"num_key_value_heads": 32, "head_dim": 128, "sliding_window": 4096},
    keys=_qwen3_keys,
    config=_qwen3_config,
    required={"qk_norm": True, "sliding_window": None},
)
QWEN3_MOE = Decoder(
    model_type="qwen3_moe",
    name="Qwen3Moe",
    defaults={"num_key_value_heads": 4},
    keys=_qwen3_moe_keys,
    config=_qwen3_moe_config,
    required={**ROUTED, "qk_norm": True, "experts": None},
)
OLMOE = Decoder(
    model_type="olmoe",
    name="Olmoe",
    defaults={"rms_norm_eps": 1e-5},
    keys=_olmoe_keys,
    config=_olmoe_config,
    required={**ROUTED, **ALL_MIX, "qk_norm": "all", "experts": None},
)
GEMMA2 = Decoder(
    model_type="gemma2",
    name="Gemma2",
    defaults={
        "num_key_value_heads": 4,
        "head_dim": 256,
        "sliding_window": 4096,
        "tie_word_embeddings": True,
        "query_pre_attn_scalar": 256,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    keys=_gemma2_keys,
    config=_gemma2_config,
    required={
        "activation": "geglu",
        "block_norm": "sandwich",
        "zero_centered_norm": True,
        "scale_embedding": True,
        "sliding_window": None,
        "query_scalar": None,
        "attention_softcap": None,
        "logit_softcap": None,
    },
)
HEAD_NORMS = {
    "attention__query_norm": ("layers.{i}.self_attn.q_norm",),
    "attention__key_norm": ("layers.{i}.self_attn.k_norm",),
}
EXPERT = "layers.{i}.mlp.experts.{e}"
EXPERTS = {
    "mlp__router": ("layers.{i}.mlp.gate",),
    "mlp__experts__{e}__up": (f"{EXPERT}.gate_proj", f"{EXPERT}.up_proj"),
    "mlp__experts__{e}__down": (f"{EXPERT}.down_proj",),
}
BLOCK = "layers.{i}.block_sparse_moe"
DECODERS = {
    "llama": LLAMA.family(),
    "mistral": MISTRAL.family(),
    "mixtral": MIXTRAL.family(
        mlp__router=(f"{BLOCK}.gate",),
        **{
            "mlp__experts__{e}__up": (f"{BLOCK}.experts.{{e}}.w1", f"{BLOCK}.experts.{{e}}.w3"),
            "mlp__experts__{e}__down": (f"{BLOCK}.experts.{{e}}.w2",),
        },
    ),
    "qwen2": QWEN2.family(),
    "qwen3": QWEN3.family(**HEAD_NORMS),
    "qwen3_moe": QWEN3_MOE.family(**EXPERTS, **HEAD_NORMS),
    "olmoe": OLMOE.family(**EXPERTS, **HEAD_NORMS),
    "gemma2": GEMMA2.family(
        attention_post_norm=("layers.{i}.post_attention_layernorm",),
        mlp_norm=("layers.{i}.pre_feedforward_layernorm",),
        mlp_post_norm=("layers.{i}.post_feedforward_layernorm",),
    ),
}


def decoder_for(model: ModelConfig) -> Family:
    """Return the family for a model with RMSNorm that ptdmpi has trained. The families are tested
    in a fixed order. The model belongs to the first family whose property the model has; if it has
    none of these properties, it belongs to LLaMA. If the model does not fit the family, the
    family's `config` raises InputError."""
    distinct = {
        "gemma2": model.block_norm == "sandwich",
        "olmoe": model.experts > 0 and model.qk_norm == "all",
        "qwen3_moe": model.experts > 0 and model.qk_norm is True,
        "mixtral": model.experts > 0,
        "qwen3": model.qk_norm,
        "qwen2": model.bias == "qkv",
        "mistral": model.sliding_window > 0,
    }
    return DECODERS[next((name for name, fits in distinct.items() if fits), "llama")]
