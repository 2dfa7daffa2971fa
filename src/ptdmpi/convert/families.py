"""Families of Hugging Face as data: their names of our parameters, and what config.json says.

Another family is another `Family` in FAMILIES and a forward pass in `reference.py`.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ptdmpi.config import InputError, ModelConfig
from ptdmpi.model.parameters import Declaration
from ptdmpi.model.stage import TIED_NAME
from ptdmpi.train.checkpoint_data import Slices

Json = Mapping[str, Any]


@dataclass(frozen=True)
class Family:
    """`modules`: our module -> theirs, one for each part of ours that they keep apart (such as q, k
    and v). `prefix` stands before the names of the base model, which leaves it out when it is saved
    alone; `head` has none. `transposed`: their linears hold [inputs, outputs]. `buffers`: tensors
    of older files that are no parameters. `keys` makes [model] of a config.json, `config` the
    reverse."""

    model_type: str
    architecture: str
    prefix: str
    modules: Mapping[str, tuple[str, ...]]
    head: str
    transposed: bool
    buffers: re.Pattern[str]
    keys: Callable[["ConfigJson"], dict[str, Any]]
    config: Callable[[ModelConfig, int], dict[str, Any]]


@dataclass(frozen=True)
class Place:
    """One of their tensors: the box of our logical tensor `ours` that it holds, transposed or not.
    `theirs` is without prefix."""

    ours: str
    whole: tuple[int, ...]
    box: Slices
    theirs: str
    transposed: bool

    @property
    def shape(self) -> tuple[int, ...]:
        """Of their tensor."""
        size = tuple(part.stop - part.start for part in self.box)
        return size[::-1] if self.transposed else size

    def inside(self, part: Slices) -> Slices:
        """A part of the box, in the whole of our tensor."""
        return tuple(
            slice(box.start + one.start, box.start + one.stop)
            for box, one in zip(self.box, part, strict=True)
        )


class ConfigJson:
    """A config.json, read key by key; `name` stands in messages."""

    def __init__(self, values: Json, name: str) -> None:
        self.values, self.name = values, name

    def get(self, key: str, default: Any = None) -> Any:
        value = self.values.get(key)
        return default if value is None else value

    def need(self, key: str) -> Any:
        if self.values.get(key) is None:
            raise InputError(f"{self.name}: {key} is missing")
        return self.values[key]

    def only(self, key: str, *legal: Any) -> Any:
        """The value, the first of `legal` where there is none; InputError for any other."""
        value = self.get(key, legal[0])
        if value not in legal:
            shown = " or ".join(repr(one) for one in legal)
            raise InputError(f"{self.name}: {key} = {value!r} is not supported; legal: {shown}")
        return value


def places(family: Family, needed: Mapping[str, Declaration]) -> Iterator[Place]:
    """Where each parameter of the model stands in their files. Raises InputError for a parameter
    that the family has not."""
    for name, declaration in needed.items():
        module, _, kind = name.rpartition(".")
        layer = re.match(r"layers\.(\d+)\.", module)
        general = module.replace(layer[0], "layers.{i}.", 1) if layer else module
        if general not in family.modules:
            raise InputError(f"a {family.model_type} of Hugging Face has nothing like {name}")
        theirs = family.modules[general]
        shape, start = declaration.shape, 0
        sizes = declaration.split.parts if len(theirs) > 1 else (shape[0],)
        transposed = family.transposed and layer is not None and len(shape) == 2
        for one, size in zip(theirs, sizes, strict=True):
            box = (slice(start, start + size), *(slice(0, length) for length in shape[1:]))
            base = one.replace("{i}", layer[1]) if layer else one
            yield Place(name, shape, box, f"{base}.{kind}", transposed)
            start += size


# -- GPT-2 (Radford et al. 2019) -------------------------------------------------------------------


def _gpt2_keys(config: ConfigJson) -> dict[str, Any]:
    activation = config.only("activation_function", "gelu_new", "gelu_pytorch_tanh", "gelu")
    config.only("scale_attn_weights", True)
    config.only("scale_attn_by_inverse_layer_idx", False)
    config.only("add_cross_attention", False)
    hidden = config.need("n_embd")
    return {
        "kind": "gpt",
        "layers": config.need("n_layer"),
        "hidden": hidden,
        "heads": config.need("n_head"),
        "activation": "gelu_exact" if activation == "gelu" else "gelu",
        "ffn_hidden": config.get("n_inner", 4 * hidden if isinstance(hidden, int) else None),
        "seq_length": config.need("n_positions"),
        "norm_eps": config.get("layer_norm_epsilon", 1e-5),
        "tie_embeddings": config.get("tie_word_embeddings", True),
    }


def _gpt2_config(model: ModelConfig, vocab_size: int) -> dict[str, Any]:
    _require(
        model,
        "gpt2",
        norm="layernorm",
        activation="gelu_exact" if model.activation == "gelu_exact" else "gelu",
        positions="learned",
        bias=True,
        kv_heads=model.heads,
    )
    return {
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
    if head_size is not None and head_size * heads != hidden:
        raise InputError(
            f"{config.name}: head_dim = {head_size} is not supported with hidden_size = {hidden} "
            f"and {heads} heads; legal: hidden_size / num_attention_heads"
        )
    biases = {key: config.get(key, False) for key in ("attention_bias", "mlp_bias")}
    if len(set(biases.values())) > 1:
        raise InputError(
            f"{config.name}: attention_bias = {biases['attention_bias']} with mlp_bias = "
            f"{biases['mlp_bias']} is not supported; legal: both true or both false"
        )
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
        "bias": biases["mlp_bias"],
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
        if kind != "default" or partial != 1.0:
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
    _require(model, "llama", norm="rmsnorm", activation="swiglu", positions="rope")
    return {
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
        "attention_bias": model.bias,
        "mlp_bias": model.bias,
        "tie_word_embeddings": model.tie_embeddings,
        "attention_dropout": model.attention_dropout,
        "initializer_range": model.init_std,
    }


# What both families are.
DECODER = {
    "attention": "causal",
    "block_norm": "pre",
    "embedding_norm": False,
    "output_head": "linear",
    "token_types": 0,
}


def _require(model: ModelConfig, family: str, **needed: Any) -> None:
    for key, value in {**DECODER, **needed}.items():
        if getattr(model, key) != value:
            raise InputError(
                f"model.{key} = {getattr(model, key)!r}: a {family} of Hugging Face has {value!r}"
            )


FAMILIES = {
    "gpt2": Family(
        model_type="gpt2",
        architecture="GPT2LMHeadModel",
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
        head="lm_head.weight",
        transposed=True,
        buffers=re.compile(r"h\.\d+\.attn\.(bias|masked_bias)"),
        keys=_gpt2_keys,
        config=_gpt2_config,
    ),
    "llama": Family(
        model_type="llama",
        architecture="LlamaForCausalLM",
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
        head="lm_head.weight",
        transposed=False,
        buffers=re.compile(r"layers\.\d+\.self_attn\.rotary_emb\.inv_freq"),
        keys=_llama_keys,
        config=_llama_config,
    ),
}


def family_of(config: ConfigJson) -> Family:
    """Raises InputError for a model_type that is not in FAMILIES."""
    name = config.need("model_type")
    if config.get("quantization_config"):
        raise InputError(f"{config.name}: quantization_config: quantized weights are not supported")
    if name not in FAMILIES:
        raise InputError(
            f"{config.name}: model_type = {name!r} is not supported; legal: {', '.join(FAMILIES)}"
        )
    return FAMILIES[name]


def family_for(model: ModelConfig) -> Family:
    """The family of a model that was trained here; its `config` refuses what does not fit."""
    return FAMILIES["llama" if model.norm == "rmsnorm" else "gpt2"]


def tied_to(family: Family, model: ModelConfig) -> dict[str, str]:
    """Their tensor that holds another one's values again, where a file has both."""
    word = f"{family.modules[TIED_NAME.removesuffix('.weight')][0]}.weight"
    return {family.head: word} if model.tie_embeddings else {}
