"""Descriptions of GPT-2 and BERT in Hugging Face's format, and the table of all known families.

A new family needs a `Family` in FAMILIES and a forward pass in `reference.py`.
"""

import re
from dataclasses import replace
from functools import partial
from typing import Any

from ptdmpi.config import InputError, ModelConfig
from ptdmpi.convert.decoders import DECODERS, decoder_for
from ptdmpi.convert.deepseek.family import FAMILY as DEEPSEEK_V3
from ptdmpi.convert.family import DECODER, PLAIN, ConfigJson, Family, require

# -- GPT-2 (Radford et al. 2019) -------------------------------------------------------------------


# Two tables of activation functions: the first maps Hugging Face's names to ptdmpi's names, and the
# second maps ptdmpi's names to Hugging Face's names.
ACTIVATIONS = {"gelu_new": "gelu", "gelu_pytorch_tanh": "gelu", "gelu": "gelu_exact"}
THEIR_ACTIVATIONS = {"gelu": "gelu_new", "gelu_exact": "gelu"}


def _gpt2_keys(config: ConfigJson) -> dict[str, Any]:
    """Return the section [model] for the config.json of a GPT-2 model."""
    activation = config.only("activation_function", "gelu_new", "gelu_pytorch_tanh", "gelu")
    config.only("scale_attn_weights", True)
    config.only("scale_attn_by_inverse_layer_idx", False)
    config.only("add_cross_attention", False)
    hidden = config.need("n_embd")
    # if the hidden size is illegal, return any MLP width, because a later check reports the hidden
    # size
    ffn_hidden = 4 * hidden if type(hidden) is int and hidden > 0 else 1
    return {
        "kind": "gpt",
        "layers": config.need("n_layer"),
        "hidden": hidden,
        "heads": config.need("n_head"),
        "activation": ACTIVATIONS[activation],
        "ffn_hidden": config.get("n_inner", ffn_hidden),
        "seq_length": config.need("n_positions"),
        "norm_eps": config.get("layer_norm_epsilon", 1e-5),
        "tie_embeddings": config.get("tie_word_embeddings", True),
    }


def _gpt2_config(model: ModelConfig, vocab_size: int) -> dict[str, Any]:
    """Return the config.json of a GPT-2 model for the section [model]. Raise InputError for a model
    that GPT-2 cannot represent."""
    require(
        model,
        "gpt2",
        **DECODER,
        **PLAIN,
        head_size=model.hidden // model.heads,
        norm="layernorm",
        activation=model.activation if model.activation in THEIR_ACTIVATIONS else "gelu",
        positions="learned",
        bias=True,
        kv_heads=model.heads,
    )
    return {
        "architectures": ["GPT2LMHeadModel"],
        "activation_function": THEIR_ACTIVATIONS[model.activation],
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


# -- BERT (Devlin et al. 2019); with norms before the blocks, "pre": Shoeybi et al. 2019 -----------


def _bert_keys(config: ConfigJson, block_norm: str = "post") -> dict[str, Any]:
    """Return the section [model] for the config.json of a BERT model."""
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
        "activation": ACTIVATIONS[activation],
        "ffn_hidden": config.need("intermediate_size"),
        "seq_length": config.need("max_position_embeddings"),
        "token_types": config.get("type_vocab_size", 2),
        "norm_eps": config.get("layer_norm_eps", 1e-12),
        "tie_embeddings": config.get("tie_word_embeddings", True),
    }


def _bert_config(model: ModelConfig, vocab_size: int, block_norm: str = "post") -> dict[str, Any]:
    """Return the config.json of a BERT model for the section [model]. Raise InputError for a model
    that BERT cannot represent."""
    name = "Bert" if block_norm == "post" else "MegatronBert"
    head = "PreTraining" if model.sentence_order else "MaskedLM"
    require(
        model,
        name,
        **PLAIN,
        head_size=model.hidden // model.heads,
        attention="bidirectional",
        block_norm=block_norm,
        embedding_norm=block_norm == "post",
        output_head="mlm",
        token_types=model.token_types or 2,
        norm="layernorm",
        activation=model.activation if model.activation in THEIR_ACTIVATIONS else "gelu_exact",
        positions="learned",
        bias=True,
        kv_heads=model.heads,
    )
    return {
        "architectures": [f"{name}For{head}"],
        "hidden_act": THEIR_ACTIVATIONS[model.activation],
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


def _bert_tasks(name: str) -> dict[str, tuple[str, str]]:
    """Return the field `tasks` of a family. `name` is the beginning of the family's class names in
    `transformers`."""
    return {
        "classification": (f"{name}ForSequenceClassification", "classifier"),
        "choice": (f"{name}ForMultipleChoice", "classifier"),
    }


# The oldest BERT files use TensorFlow's names for the parameters of norms.
GREEK = {"gamma": "weight", "beta": "bias"}

BERT = Family(
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
    # In a model without a head after the pooler, the pooler affects no loss. ptdmpi's model then
    # has no pooler, so the tensors of the pooler are buffers.
    buffers=re.compile(r"embeddings\.(position|token_type)_ids|pooler\.dense\.(weight|bias)"),
    keys=_bert_keys,
    config=_bert_config,
    again={"cls.predictions.decoder.bias": "cls.predictions.bias"},
    told_by={"sentence_order": "cls.seq_relationship.weight"},
    renamed={f"LayerNorm.{old}": f"LayerNorm.{new}" for old, new in GREEK.items()},
    tasks=_bert_tasks("Bert"),
)
# In Megatron's BERT, all modules except the norms have the same names as in BERT.
MEGATRON_BERT = replace(
    BERT,
    model_type="megatron-bert",
    modules={
        **{ours: theirs for ours, theirs in BERT.modules.items() if ours != "embedding.norm"},
        "layers.{i}.attention_norm": ("encoder.layer.{i}.attention.ln",),
        "layers.{i}.mlp_norm": ("encoder.layer.{i}.ln",),
        "final_norm": ("encoder.ln",),
    },
    keys=partial(_bert_keys, block_norm="pre"),
    config=partial(_bert_config, block_norm="pre"),
    tasks=_bert_tasks("MegatronBert"),
)
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
        tasks={"classification": ("GPT2ForSequenceClassification", "score")},
    ),
    **DECODERS,
    DEEPSEEK_V3.model_type: DEEPSEEK_V3,
    "bert": BERT,
    "megatron-bert": MEGATRON_BERT,
}


def family_of(config: ConfigJson) -> Family:
    """Return the family of the model that a config.json describes. Raise InputError for a
    model_type that is not in FAMILIES, and for quantized weights."""
    name = config.need("model_type")
    if config.get("quantization_config"):
        raise InputError(f"{config.name}: quantization_config: quantized weights are not supported")
    if not isinstance(name, str) or name not in FAMILIES:
        raise InputError(
            f"{config.name}: model_type = {name!r} is not supported; legal: {', '.join(FAMILIES)}"
        )
    return FAMILIES[name]


def family_for(model: ModelConfig) -> Family:
    """Return the family for a model that ptdmpi has trained. If the model does not fit the family,
    the family's `config` raises InputError."""
    if model.masked:
        return FAMILIES["bert" if model.block_norm == "post" else "megatron-bert"]
    if model.latent:
        return DEEPSEEK_V3
    if model.norm == "rmsnorm":
        return decoder_for(model)
    return FAMILIES["gpt2"]
