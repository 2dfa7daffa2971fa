"""The description of DeepSeek-V3 in Hugging Face's format (DeepSeek-AI 2024, arXiv 2412.19437)."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ptdmpi.config import InputError, ModelConfig
from ptdmpi.config.kinds import LATENT
from ptdmpi.convert.decoders import EXPERTS, Decoder
from ptdmpi.convert.family import AHEAD, ConfigJson, Family, require
from ptdmpi.convert.rope import rope_config
from ptdmpi.convert.windows import require_whole
from ptdmpi.plan.layer.ahead.modules import MODULES

NAME = "deepseek_v3"
# keys of config.json, and the keys of [model] with the same values
SAME = {
    "q_lora_rank": "q_lora_rank",
    "kv_lora_rank": "kv_lora_rank",
    "qk_rope_head_dim": "rope_head_size",
    "v_head_dim": "value_head_size",
    "n_routed_experts": "experts",
    "num_experts_per_tok": "experts_per_token",
    "moe_intermediate_size": "expert_hidden",
    "n_shared_experts": "shared_experts",
    "first_k_dense_replace": "dense_layers",
    "n_group": "router_groups",
    "topk_group": "router_top_groups",
}
# the defaults in `transformers` of the keys in `SAME`, and of other keys
DEFAULTS = {
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "n_shared_experts": 1,
    "first_k_dense_replace": 3,
    "n_group": 8,
    "topk_group": 4,
    AHEAD: 1,
}


def _keys(config: ConfigJson) -> dict[str, Any]:
    config.only("hidden_act", "silu", "swish")
    config.only("rope_interleave", True)
    config.only("scoring_func", "sigmoid")
    config.only("topk_method", "noaux_tc")
    config.only("moe_layer_freq", 1)
    if config.values["q_lora_rank"] is None:
        raise InputError(
            f"{config.name}: q_lora_rank = null (queries without compression) is not supported; "
            "legal: 1 or more"
        )
    same = {ours: require_whole(config, key, config.need(key)) for key, ours in SAME.items()}
    plain = require_whole(config, "qk_nope_head_dim", config.need("qk_nope_head_dim"))
    return {
        **same,
        "kind": "deepseek",
        "mtp_depth": require_whole(config, AHEAD, config.get(AHEAD, 0)),
        "kv_heads": config.need("num_attention_heads"),
        "head_size": plain + same["rope_head_size"],
        "bias": "attention" if config.only("attention_bias", False, True) else False,
        "router": "sigmoid",
        "router_scale": float(config.get("routed_scaling_factor", 2.5)),
        "router_normalize": config.only("norm_topk_prob", True, False),
        "rope_mscale": _mscale(config),
    }


def _mscale(config: ConfigJson) -> float:
    """Return the value of YaRN's key `mscale_all_dim`, from which the scale of the attention scores
    is computed. Return 0 if config.json does not have the key. Call `rope_keys` first, because it
    checks the tables of config.json that this function reads."""
    for key in ("rope_parameters", "rope_scaling"):
        rope: Mapping[str, Any] = config.get(key, {})
        if rope.get("rope_type", rope.get("type")) == "yarn":
            return float(rope.get("mscale_all_dim") or 0.0)
    return 0.0


def _config(model: ModelConfig) -> dict[str, Any]:
    if model.bias is not False:
        require(model, NAME, bias="attention")
    require(model, NAME, query_scalar=0.0, q_lora_rank=model.q_lora_rank or 1)
    if not model.experts:
        require(model, NAME, experts=DEFAULTS["n_routed_experts"])
    scaled = {"mscale": model.rope_mscale, "mscale_all_dim": model.rope_mscale}
    rope = rope_config(model)
    if model.rope_mscale:
        for key in ("rope_scaling", "rope_parameters"):
            rope[key] = {**rope[key], **scaled}
    return {
        **{key: getattr(model, ours) for key, ours in SAME.items()},
        "v_head_dim": model.value_head_size or model.head_size,
        "qk_nope_head_dim": model.head_size - model.rope_head_size,
        "head_dim": model.rope_head_size,
        "attention_bias": model.attention_bias,
        "rope_interleave": True,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "moe_layer_freq": 1,
        "routed_scaling_factor": model.router_scale,
        "norm_topk_prob": model.router_normalize,
        AHEAD: model.mtp_modules,
        **rope,
    }


DEEPSEEK_V3 = Decoder(
    model_type=NAME,
    name="DeepseekV3",
    defaults=DEFAULTS,
    keys=_keys,
    config=_config,
    required={
        "sublayers": (LATENT, "mlp"),
        "router": "sigmoid",
        "balance": "bias",
        "moe_every": 1,
        "experts": None,
        "query_scalar": None,
    },
)
SELF = "layers.{i}.self_attn"
SHARED = "layers.{i}.mlp.shared_experts"
NAMES = {
    **EXPERTS,
    "mlp__shared__up": (f"{SHARED}.gate_proj", f"{SHARED}.up_proj"),
    "mlp__shared__down": (f"{SHARED}.down_proj",),
    "attention__down": (f"{SELF}.q_a_proj", f"{SELF}.kv_a_proj_with_mqa"),
    "attention__q_norm": (f"{SELF}.q_a_layernorm",),
    "attention__kv_norm": (f"{SELF}.kv_a_layernorm",),
    "attention__q_up": (f"{SELF}.q_b_proj",),
    "attention__kv_up": (f"{SELF}.kv_b_proj",),
}
PLAIN: Family = DEEPSEEK_V3.family(**NAMES)
# the tensors that a module for multi-token prediction has in addition to the tensors of a layer
MODULE = {
    "token_norm": ("layers.{i}.enorm",),
    "hidden_norm": ("layers.{i}.hnorm",),
    "projection": ("layers.{i}.eh_proj",),
    "norm": ("layers.{i}.shared_head.norm",),
}
OF_LAYER = {
    ours.removeprefix("layers.{i}."): theirs
    for ours, theirs in PLAIN.modules.items()
    if ours.startswith("layers.{i}.")
}
FAMILY: Family = replace(
    PLAIN,
    modules={
        **PLAIN.modules,
        **{f"{MODULES}.{{i}}.{ours}": theirs for ours, theirs in {**OF_LAYER, **MODULE}.items()},
    },
    parameters={"balance": "e_score_correction_bias"},
    copies={
        "layers.{i}.embed_tokens.weight": "embed_tokens.weight",
        "layers.{i}.shared_head.head.weight": "lm_head.weight",
    },
)
