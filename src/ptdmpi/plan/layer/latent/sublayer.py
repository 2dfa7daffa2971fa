"""The sublayer of multi-head latent attention, as operators in order."""

from collections.abc import Iterator
from dataclasses import fields, replace

from ptdmpi.config import ModelConfig
from ptdmpi.plan.layer.attention.core import Attend
from ptdmpi.plan.layer.attention.exchange import DealHeads, GatherKeys, JoinHeads
from ptdmpi.plan.layer.describe import LayerBuild, norm_part
from ptdmpi.plan.layer.latent.operators import (
    EXPANSION,
    ExpandLatents,
    ExpandOutputs,
    JoinLatents,
    SplitLatents,
)
from ptdmpi.plan.layer.operator import Operator
from ptdmpi.plan.layer.parts import Linear
from ptdmpi.plan.layer.sublayer import Sublayer


def latent_attention(build: LayerBuild) -> Sublayer:
    """Return the sublayer of multi-head latent attention (DeepSeek-AI 2024, V2: arXiv 2405.04434,
    section 2.1): x -> norm -> down -> latents -> q_up, kv_up -> heads -> core -> out -> x +
    dropout.

    The tensor axis divides the heads. Each tensor rank has the whole compressing linear layer.
    Under sequence parallelism, a rank applies this linear layer only to its own positions.
    """
    model = build.model
    qkv, values = ("q", "k", "v"), ("y",)
    out = Linear(
        inputs=model.values_width,
        outputs=(model.hidden,),
        bias=model.attention_bias,
        init_std=build.residual_std,
        split="rows",
    )
    product = build.product("attention.out", out, "y", "y")
    keeps = product.keeps_input
    return build.sublayer(
        "attention",
        0,
        *_compressed(build),
        JoinLatents("attention.heads", ("q", "kv", "k"), qkv),
        GatherKeys("attention.keys", qkv, qkv),
        DealHeads("attention.dealt", qkv, qkv),
        Attend("attention.core", qkv, values, feeds_kept=keeps),
        JoinHeads("attention.joined", values, values, feeds_kept=keeps),
        ExpandOutputs("attention.values", values, values),
        replace(product, shares_input=keeps),
    )


def _compressed(build: LayerBuild) -> Iterator[Operator]:
    """Yield the operators from the sublayer's input "y" to the expanded queries "q", the expanded
    keys and values "kv", and the rotary key "k". If the model does not compress queries, a linear
    layer computes the queries from the sublayer's input."""
    model = build.model
    rank, key = model.kv_lora_rank, model.kv_lora_rank + model.rope_head_size
    queries = model.attention_width
    down = (model.q_lora_rank, key) if model.q_lora_rank else (key,)
    shares = False
    if not model.q_lora_rank:
        direct = build.product("attention.q", _expanding(model, model.hidden, queries), "y", "q")
        shares = direct.keeps_input
        yield direct
    linear = Linear(
        inputs=model.hidden,
        outputs=down,
        bias=model.qkv_bias,
        init_std=model.matrix_std,
        shared_gradient=True,
    )
    product = build.product("attention.down", linear, "y", "latent")
    yield replace(product, rows="local", shares_input=shares)
    norms = {"attention.kv_norm": norm_part(model, rank)}
    outputs: tuple[str, ...] = ("kv", "k")
    if model.q_lora_rank:
        norms = {"attention.q_norm": norm_part(model, model.q_lora_rank), **norms}
        outputs = ("q", "kv", "k")
    yield SplitLatents(
        "attention.latents", ("latent",), outputs, norms=tuple(norms.items()), width=sum(down)
    )
    if model.q_lora_rank:
        yield build.product(
            "attention.q_up", _expanding(model, model.q_lora_rank, queries), "q", "q"
        )
    expanded = queries - model.heads * model.rope_head_size + model.values_width
    product = build.product(EXPANSION, _expanding(model, rank, expanded), "kv", "kv")
    yield ExpandLatents(**{field.name: getattr(product, field.name) for field in fields(product)})


def _expanding(model: ModelConfig, inputs: int, outputs: int) -> Linear:
    """Return a linear layer with `inputs` inputs, whose `outputs` outputs are heads. The tensor
    axis divides the heads."""
    return Linear(inputs, (outputs,), bias=False, init_std=model.matrix_std, split="columns")
