"""GPT-2, LLaMA and BERT of Hugging Face as data: their names of our parameters, and what their
config.json says.

Another family is another `Family` in FAMILIES and a forward pass in `reference.py`.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from ptdmpi.config import InputError, ModelConfig
from ptdmpi.convert.family import ConfigJson, Family

# What GPT-2 and LLaMA both are.
DECODER = {
    "attention": "causal",
    "block_norm": "pre",
    "embedding_norm": False,
    "output_head": "linear",
    "token_types": 0,
}


# -- GPT-2 (Radford et al. 2019) -------------------------------------------------------------------


def _gpt2_keys(config: ConfigJson) -> dict[str, Any]:
    activation = config.only("activation_function", "gelu_new", "gelu_pytorch_tanh", "gelu")
    config.only("scale_attn_weights", True)
    config.only("scale_attn_by_inverse_layer_idx", False)
    config.only("add_cross_attention", False)
    hidden = config.need("n_embd")
    whole = type(hidden) is int and hidden > 0
    return {
        "kind": "gpt",
        "layers": config.need("n_layer"),
        "hidden": hidden,
        "heads": config.need("n_head"),
        "activation": "gelu_exact" if activation == "gelu" else "gelu",
        # of a wrong width is told as such: any stands in
        "ffn_hidden": config.get("n_inner", 4 * hidden if whole else 1),
        "seq_length": config.need("n_positions"),
        "norm_eps": config.get("layer_norm_epsilon", 1e-5),
        "tie_embeddings": config.get("tie_word_embeddings", True),
    }


def _gpt2_config(model: ModelConfig, vocab_size: int) -> dict[str, Any]:
    _require(
        model,
        "gpt2",
        **DECODER,
        norm="layernorm",
        activation="gelu_exact" if model.activation == "gelu_exact" else "gelu",
        positions="learned",
        bias=True,
        kv_heads=model.heads,
    )
    return {
        "architectures": ["GPT2LMHeadModel"],
        "activation_function": "gelu" if model.activation == "gelu_exact" else "gelu_new",
        "vocab_size": vocab_size,
        "n_layer": model.layers,
        "n_embd": model.hidden,
        "n_head": model.heads,
        "n_inner": model.ffn_hidden,
        "n_positions": model.seq_length,
        "layer_norm_epsilon": model.norm_eps,
        "tie_word_embeddings": model.tie_embeddings,
        "resid_pdrop": model.dropout,
        "embd_pdrop": model.dropout,
        "attn_pdrop": model.attention_dropout,
        "initializer_range": model.init_std,
    }


# -- LLaMA (Touvron et al. 2023; grouped queries: LLaMA 2) -----------------------------------------


def _llama_keys(config: ConfigJson) -> dict[str, Any]:
    config.only("hidden_act", "silu", "swish")
    hidden, heads = config.need("hidden_size"), config.need("num_attention_heads")
    head_size = config.get("head_dim")
    whole = isinstance(head_size, int) and isinstance(heads, int)
    if head_size is not None and not (whole and head_size * heads == hidden):
        raise InputError(
            f"{config.name}: head_dim = {head_size} is not supported with hidden_size = {hidden} "
            f"and {heads} heads; legal: hidden_size / num_attention_heads"
        )
    attention, mlp = (config.only(key, False, True) for key in ("attention_bias", "mlp_bias"))
    biases = {(True, False): "attention", (False, True): "mlp"}
    return {
        "kind": "llama",
        "layers": config.need("num_hidden_layers"),
        "hidden": hidden,
        "heads": heads,
        "kv_heads": config.get("num_key_value_heads", heads),
        "ffn_hidden": config.need("intermediate_size"),
        "seq_length": config.need("max_position_embeddings"),
        "norm_eps": config.get("rms_norm_eps", 1e-6),
        "rope_theta": _rope_theta(config),
        "bias": biases.get((attention, mlp), bool(mlp)),
        "tie_embeddings": config.get("tie_word_embeddings", False),
    }


def _rope_theta(config: ConfigJson) -> float:
    """`rope_parameters` holds it in newer files, the top level in older ones, where `rope_scaling`
    names what our angles do not know."""
    theta = config.get("rope_theta", 10000.0)
    for key in ("rope_parameters", "rope_scaling"):
        rope = config.get(key, {})
        if not isinstance(rope, Mapping):
            raise InputError(f"{config.name}: {key} = {rope!r} is no JSON object")
        kind = rope.get("rope_type", rope.get("type", "default"))
        partial = rope.get("partial_rotary_factor", 1.0)
        by_layer = any(isinstance(one, Mapping) for one in rope.values())
        if kind != "default" or partial != 1.0 or by_layer:
            raise InputError(
                f"{config.name}: {key} = {dict(rope)} is not supported; legal: "
                'rope_type "default" on whole heads'
            )
        theta = rope.get("rope_theta", theta)
    config.only("partial_rotary_factor", 1.0)
    if isinstance(theta, bool) or not isinstance(theta, int | float):
        raise InputError(f"{config.name}: rope_theta = {theta!r} is no number")
    return float(theta)


def _llama_config(model: ModelConfig, vocab_size: int) -> dict[str, Any]:
    _require(model, "llama", **DECODER, norm="rmsnorm", activation="swiglu", positions="rope")
    return {
        "architectures": ["LlamaForCausalLM"],
        "hidden_act": "silu",
        "vocab_size": vocab_size,
        "num_hidden_layers": model.layers,
        "hidden_size": model.hidden,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "intermediate_size": model.ffn_hidden,
        "max_position_embeddings": model.seq_length,
        "rms_norm_eps": model.norm_eps,
        "rope_theta": model.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": model.rope_theta},
        "attention_bias": model.attention_bias,
        "mlp_bias": model.mlp_bias,
        "tie_word_embeddings": model.tie_embeddings,
        "attention_dropout": model.attention_dropout,
        "initializer_range": model.init_std,
    }


# -- BERT (Devlin et al. 2019); with norms in front of the blocks, "pre": Shoeybi et al. 2019 ------


def _bert_keys(config: ConfigJson, block_norm: str = "post") -> dict[str, Any]:
    activation = config.only("hidden_act", "gelu", "gelu_new", "gelu_pytorch_tanh")
    config.only("position_embedding_type", "absolute")
    config.only("is_decoder", False)
    config.only("add_cross_attention", False)
    config.only("pruned_heads", {})
    return {
        "kind": "bert",
        "block_norm": block_norm,
        "embedding_norm": block_norm == "post",
        "layers": config.need("num_hidden_layers"),
        "hidden": config.need("hidden_size"),
        "heads": config.need("num_attention_heads"),
        "activation": "gelu_exact" if activation == "gelu" else "gelu",
        "ffn_hidden": config.need("intermediate_size"),
        "seq_length": config.need("max_position_embeddings"),
        "token_types": config.get("type_vocab_size", 2),
        "norm_eps": config.get("layer_norm_eps", 1e-12),
        "tie_embeddings": config.get("tie_word_embeddings", True),
    }


def _bert_config(model: ModelConfig, vocab_size: int, block_norm: str = "post") -> dict[str, Any]:
    name = "Bert" if block_norm == "post" else "MegatronBert"
    _require(
        model,
        name,
        attention="bidirectional",
        block_norm=block_norm,
        embedding_norm=block_norm == "post",
        output_head="mlm",
        token_types=model.token_types or 2,
        norm="layernorm",
        activation="gelu" if model.activation == "gelu" else "gelu_exact",
        positions="learned",
        bias=True,
        kv_heads=model.heads,
    )
    return {
        "architectures": [f"{name}For{'PreTraining' if model.sentence_order else 'MaskedLM'}"],
        "hidden_act": "gelu" if model.activation == "gelu_exact" else "gelu_new",
        "vocab_size": vocab_size,
        "num_hidden_layers": model.layers,
        "hidden_size": model.hidden,
        "num_attention_heads": model.heads,
        "intermediate_size": model.ffn_hidden,
        "max_position_embeddings": model.seq_length,
        "type_vocab_size": model.token_types,
        "layer_norm_eps": model.norm_eps,
        "tie_word_embeddings": model.tie_embeddings,
        "hidden_dropout_prob": model.dropout,
        "attention_probs_dropout_prob": model.attention_dropout,
        "initializer_range": model.init_std,
        "pad_token_id": None,
    }


def _require(model: ModelConfig, family: str, **needed: Any) -> None:
    for key, value in needed.items():
        if getattr(model, key) != value:
            raise InputError(
                f"model.{key} = {getattr(model, key)!r}: a {family} of Hugging Face has {value!r}"
            )


# The first BERT files have the names of TensorFlow's.
GREEK = {"gamma": "weight", "beta": "bias"}

FAMILIES = {
    "gpt2": Family(
        model_type="gpt2",
        prefix="transformer.",
        modules={
            "embedding.word": ("wte",),
            "embedding.position": ("wpe",),
            "layers.{i}.attention_norm": ("h.{i}.ln_1",),
            "layers.{i}.attention.qkv": ("h.{i}.attn.c_attn",),
            "layers.{i}.attention.out": ("h.{i}.attn.c_proj",),
            "layers.{i}.mlp_norm": ("h.{i}.ln_2",),
            "layers.{i}.mlp.up": ("h.{i}.mlp.c_fc",),
            "layers.{i}.mlp.down": ("h.{i}.mlp.c_proj",),
            "final_norm": ("ln_f",),
            "head": ("lm_head",),
        },
        transposed=True,
        buffers=re.compile(r"h\.\d+\.attn\.(bias|masked_bias)"),
        keys=_gpt2_keys,
        config=_gpt2_config,
    ),
    "llama": Family(
        model_type="llama",
        prefix="model.",
        modules={
            "embedding.word": ("embed_tokens",),
            "layers.{i}.attention_norm": ("layers.{i}.input_layernorm",),
            "layers.{i}.attention.qkv": tuple(f"layers.{{i}}.self_attn.{x}_proj" for x in "qkv"),
            "layers.{i}.attention.out": ("layers.{i}.self_attn.o_proj",),
            "layers.{i}.mlp_norm": ("layers.{i}.post_attention_layernorm",),
            "layers.{i}.mlp.up": ("layers.{i}.mlp.gate_proj", "layers.{i}.mlp.up_proj"),
            "layers.{i}.mlp.down": ("layers.{i}.mlp.down_proj",),
            "final_norm": ("norm",),
            "head": ("lm_head",),
        },
        transposed=False,
        buffers=re.compile(r"layers\.\d+\.self_attn\.rotary_emb\.inv_freq"),
        keys=_llama_keys,
        config=_llama_config,
    ),
    "bert": Family(
        model_type="bert",
        prefix="bert.",
        modules={
            "embedding.word": ("embeddings.word_embeddings",),
            "embedding.position": ("embeddings.position_embeddings",),
            "embedding.token_type": ("embeddings.token_type_embeddings",),
            "embedding.norm": ("embeddings.LayerNorm",),
            "layers.{i}.attention.qkv": tuple(
                f"encoder.layer.{{i}}.attention.self.{x}" for x in ("query", "key", "value")
            ),
            "layers.{i}.attention.out": ("encoder.layer.{i}.attention.output.dense",),
            "layers.{i}.attention_norm": ("encoder.layer.{i}.attention.output.LayerNorm",),
            "layers.{i}.mlp.up": ("encoder.layer.{i}.intermediate.dense",),
            "layers.{i}.mlp.down": ("encoder.layer.{i}.output.dense",),
            "layers.{i}.mlp_norm": ("encoder.layer.{i}.output.LayerNorm",),
            "mlm.dense": ("cls.predictions.transform.dense",),
            "mlm.norm": ("cls.predictions.transform.LayerNorm",),
            "head": ("cls.predictions.decoder",),
            "sentence.pooler": ("pooler.dense",),
            "sentence.order": ("cls.seq_relationship",),
        },
        transposed=False,
        # a pooler without the head behind it has no part in any loss
        buffers=re.compile(r"embeddings\.(position|token_type)_ids|pooler\.dense\.(weight|bias)"),
        keys=_bert_keys,
        config=_bert_config,
        again={"cls.predictions.decoder.bias": "cls.predictions.bias"},
        told_by={"sentence_order": "cls.seq_relationship.weight"},
        renamed={f"LayerNorm.{old}": f"LayerNorm.{new}" for old, new in GREEK.items()},
    ),
}
# Its names but for the norms.
FAMILIES["megatron-bert"] = replace(
    FAMILIES["bert"],
    model_type="megatron-bert",
    modules={
        **{key: one for key, one in FAMILIES["bert"].modules.items() if key != "embedding.norm"},
        "layers.{i}.attention_norm": ("encoder.layer.{i}.attention.ln",),
        "layers.{i}.mlp_norm": ("encoder.layer.{i}.ln",),
        "final_norm": ("encoder.ln",),
    },
    keys=partial(_bert_keys, block_norm="pre"),
    config=partial(_bert_config, block_norm="pre"),
)


def family_of(config: ConfigJson) -> Family:
    """Raises InputError for a model_type that is not in FAMILIES."""
    name = config.need("model_type")
    if config.get("quantization_config"):
        raise InputError(f"{config.name}: quantization_config: quantized weights are not supported")
    if not isinstance(name, str) or name not in FAMILIES:
        raise InputError(
            f"{config.name}: model_type = {name!r} is not supported; legal: {', '.join(FAMILIES)}"
        )
    return FAMILIES[name]


def family_for(model: ModelConfig) -> Family:
    """The family of a model that was trained here; its `config` refuses what does not fit."""
    if model.masked:
        return FAMILIES["bert" if model.block_norm == "post" else "megatron-bert"]
    return FAMILIES["llama" if model.norm == "rmsnorm" else "gpt2"]
