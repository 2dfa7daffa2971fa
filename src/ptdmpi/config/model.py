"""The section [model] of a configuration: the shape of the transformer, and the default values for
each kind of model.
"""

import itertools
import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, PrivateAttr, model_validator

from ptdmpi.config.adapt import EXPERTS, MLP, AdaptConfig
from ptdmpi.config.choices import CodesName
from ptdmpi.config.kinds import (
    LATENT,
    MODEL_KINDS,
    LayerKind,
    LayerRun,
    Runs,
    merged,
    mixing_layers,
)
from ptdmpi.config.precision import Scaling
from ptdmpi.config.section import (
    MOST,
    Bound,
    FileName,
    Fraction,
    NonNegative,
    Positive,
    Reported,
    Section,
)

# Name of a built-in sublayer -> the function that describes the sublayer, as "module:function". All
# other names in `model.sublayers` must have the form "module:function". The built-in names are
# listed here so that a configuration can be checked without importing the modules.
SUBLAYERS: Mapping[str, str] = {
    "attention": "ptdmpi.plan.layer.describe:attention",
    "mlp": "ptdmpi.plan.layer.describe:mlp",
    LATENT: "ptdmpi.plan.layer.latent.sublayer:latent_attention",
}
# The maximum number of layers. The number is limited, because every layer is a separate torch
# module. The deepest trained Transformers have 1,000 layers (Wang et al. 2022, arXiv 2203.00555),
# and the deepest networks have 10,000 (Xiao et al. 2018, arXiv 1806.05393).
MOST_LAYERS = 10_000
MOST_EXPERTS = 10_000  # limited, because every expert is a separate torch module.
MOST_MODULES = 4  # the maximum number of modules for multi-token prediction
MASK_FRACTION = 0.15  # Devlin et al. 2019, section 3.1.
# Activation functions of gated MLPs. In a gated MLP, one half of the first linear layer's output is
# multiplied by the activation of the other half.
GATED = ("swiglu", "geglu")

Number = Annotated[float, Field(gt=0)]
Cap = Annotated[float, Field(ge=0)]


class QuantizeConfig(Section):
    """The section [quantize]: the format of quantized weights. Only the weights of the linear
    layers inside the transformer layers are quantized. A row of a weight is divided into blocks.
    Each block has a scale, and each number of the block is replaced by a code of 4 or 8 bits.
    Trained weights are rounded to this format in every matrix product; frozen weights are stored in
    this format.
    """

    weights: Reported[CodesName | Literal["none"]] = "none"
    block: Reported[Annotated[int, Field(ge=2, le=2**20, multiple_of=2)]] = 64


# keys whose defaults `ModelConfig._fill_in` computes from the values of other keys
DERIVED = ("kv_heads", "head_size", "rope_high_factor", "ffn_hidden", "expert_hidden")


class ModelConfig(Section):
    """The section [model]: a transformer with `layers` layers (l), hidden size `hidden` (h) and
    `heads` attention heads (a), for sequences of `seq_length` tokens (s).
    """

    kind: Bound[
        Literal["gpt", "llama", "mistral", "qwen2", "qwen3", "deepseek", "gemma2", "bert"]
    ] = "gpt"
    layers: Bound[Annotated[int, Field(ge=1, le=MOST_LAYERS)]]
    hidden: Bound[Positive]
    heads: Bound[Positive]
    kv_heads: Bound[Positive]
    head_size: Bound[NonNegative]
    q_lora_rank: Bound[NonNegative] = 0
    kv_lora_rank: Bound[NonNegative] = 0
    rope_head_size: Bound[NonNegative] = 0
    value_head_size: Bound[NonNegative] = 0
    ffn_hidden: Bound[Positive]
    seq_length: Bound[Positive]
    vocab_size: Bound[NonNegative] = 0
    norm: Bound[Literal["layernorm", "rmsnorm"]]
    zero_centered_norm: Bound[bool] = False
    qk_norm: Bound[bool | Literal["all"]] = False
    activation: Bound[Literal["gelu", "gelu_exact", "swiglu", "geglu"]]
    experts: Bound[Annotated[int, Field(ge=0, le=MOST_EXPERTS)]] = 0
    experts_per_token: Bound[NonNegative] = 0
    expert_hidden: Bound[Positive]
    shared_experts: Bound[NonNegative] = 0
    dense_layers: Bound[NonNegative] = 0
    moe_every: Bound[Positive] = 1
    router: Bound[Literal["softmax", "sigmoid"]] = "softmax"
    router_normalize: Bound[bool] = True
    router_scale: Bound[Number] = 1.0
    router_groups: Bound[Positive] = 1
    router_top_groups: Bound[Positive] = 1
    balance: Bound[Literal["bias", "sequence", "batch", "none"]] = "bias"
    balance_coefficient: Reported[Number] = 0.001
    z_loss_coefficient: Reported[Cap] = 0.0
    mtp_depth: Bound[Annotated[int, Field(ge=0, le=MOST_MODULES)]] = 0
    mtp_loss_coefficient: Reported[Cap] = 0.3
    positions: Bound[Literal["learned", "rope"]]
    bias: Bound[bool | Literal["attention", "qkv", "mlp"]]
    tie_embeddings: Bound[bool]
    scale_embedding: Bound[bool] = False
    attention: Bound[Literal["causal", "bidirectional"]]
    query_scalar: Bound[Cap] = 0.0
    attention_softcap: Bound[Cap] = 0.0
    logit_softcap: Bound[Cap] = 0.0
    sliding_window: Bound[NonNegative] = 0
    sliding_layers: Bound[
        Literal["all", "even"] | Annotated[tuple[NonNegative, ...], Field(strict=False)]
    ] = "all"
    sublayers: Bound[Annotated[tuple[FileName, ...], Field(min_length=1, strict=False)]] = (
        "attention",
        "mlp",
    )
    block_norm: Bound[Literal["pre", "post", "sandwich"]]
    embedding_norm: Bound[bool]
    output_head: Bound[Literal["linear", "mlm", "classes"]]
    classes: Bound[NonNegative] = 0
    token_types: Bound[NonNegative]
    sentence_order: Bound[bool]
    norm_eps: Bound[Number]
    rope_theta: Bound[Number] = 10000.0
    rope_scaling: Bound[Literal["none", "llama3", "yarn"]] = "none"
    rope_factor: Bound[Number] = 8.0
    rope_low_factor: Bound[Number] = 1.0
    rope_high_factor: Bound[Number]
    rope_original_length: Bound[Positive] = 8192
    rope_attention_factor: Bound[Cap] = 0.0
    rope_mscale: Bound[Cap] = 0.0
    dropout: Reported[Fraction] = 0.0
    attention_dropout: Reported[Fraction] = 0.0
    init_std: Reported[Number] = 0.02
    mup_base_hidden: Bound[NonNegative] = 0
    mup_base_head_size: Bound[NonNegative] = 0
    # the section [adapt]: code that builds the model or counts its parameters must know the
    # adapters
    _adapt: AdaptConfig = PrivateAttr(default_factory=AdaptConfig)
    # the section [quantize]: the format of the model's quantized matrices, trained or frozen
    _quantize: QuantizeConfig = PrivateAttr(default_factory=QuantizeConfig)
    # from the section [precision]: which numbers share a scale in the matrix products of linear
    # layers
    _scaling: Scaling = PrivateAttr(default="none")

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        kind = values.get("kind", "gpt")
        known = isinstance(kind, str) and kind in MODEL_KINDS
        # A wrong value is reported only once. If the default of another key depends on the wrong
        # value, that key gets an arbitrary value and is not reported.
        filled = {**MODEL_KINDS[kind if known else "gpt"], **values}
        heads: Any = filled.get("heads")
        hidden: Any = filled.get("hidden")
        filled.setdefault("kv_heads", heads if _sound(heads) else 1)
        # the defaults of YaRN and of Llama 3
        filled.setdefault("rope_high_factor", 32.0 if values.get("rope_scaling") == "yarn" else 4.0)
        # 0 if the number of heads does not divide the hidden size h; a rule reports this mistake
        if "head_size" not in filled:
            whole = _sound(hidden) and _sound(heads) and hidden % heads == 0
            filled["head_size"] = hidden // heads if whole else 0
        if "ffn_hidden" not in filled:
            ffn_hidden = default_ffn_hidden(filled) if _sound(hidden) else 1
            filled["ffn_hidden"] = min(ffn_hidden, MOST)
        filled.setdefault("expert_hidden", filled["ffn_hidden"])
        return filled

    @property
    def adapt(self) -> AdaptConfig:
        """Return the section [adapt]: which adapters are trained while the model is frozen."""
        return self._adapt

    def idle(self, layers: range | None = None) -> int:
        """Return how many layers of the range `layers` come before the first layer with adapters,
        and therefore have no backward pass. The result is 0 if the model is trained without
        adapters. If `layers` is None, all layers of the model are counted.
        """
        if layers is None:
            layers = range(self.layers)
        return max(0, min(self.adapt.first_layer, layers.stop) - layers.start)

    def mixes(self, layer: int) -> bool:
        """Return True if layer number `layer` has experts instead of a single MLP."""
        return self.experts > 0 and layer >= self.dense_layers and (layer + 1) % self.moe_every == 0

    @property
    def mixing_layers(self) -> tuple[int, ...]:
        """Return the numbers of the layers that have experts."""
        if not self.experts:
            return ()
        return mixing_layers(self.layers, self.dense_layers, self.moe_every)

    @property
    def mtp_modules(self) -> int:
        """Return the number of modules for multi-token prediction (DeepSeek-AI 2024, V3: arXiv
        2412.19437, section 2.2). Without adapters and without a head for a task, the result is
        `mtp_depth`. With adapters or such a head, the result is 0, because the model then has no
        such modules."""
        return 0 if self.adapt.adapts or self.classifies else self.mtp_depth

    @property
    def shares_table(self) -> bool:
        """Return True if the embedding's table is also used after the last layer: by a tied head,
        or by modules for multi-token prediction."""
        return self.tie_embeddings or self.mtp_modules > 0

    @property
    def routing_layers(self) -> tuple[int, ...]:
        """Return the numbers of the layers that have experts (`mixing_layers`), and the numbers of
        the modules for multi-token prediction whose layer has experts. The numbers of the modules
        follow the numbers of the layers: module k has the number `layers` + k."""
        modules = range(self.layers, self.layers + self.mtp_modules)
        return (*self.mixing_layers, *(modules if self.mixes(self.layers - 1) else ()))

    @property
    def has_dense_layers(self) -> bool:
        """Return True if at least one layer has no experts."""
        return self.experts == 0 or self.dense_layers > 0 or self.moe_every > 1

    @property
    def has_unlike_layers(self) -> bool:
        """Return True if some layers have experts, and others do not."""
        return self.experts > 0 and self.has_dense_layers

    def kind_of(self, layer: int) -> LayerKind:
        """Return the kind of layer number `layer`."""
        return LayerKind(self.mixes(layer), layer < self.adapt.first_layer)

    def runs(self, layers: range | None = None) -> Runs:
        """Return the layers in the range `layers` as runs, in order; a run consists of neighbouring
        layers of the same kind. If `layers` is None, the result is for all layers of the model.
        """
        if layers is None:
            layers = range(self.layers)
        if self.experts and self.moe_every > 1:
            return merged(LayerRun(self.kind_of(layer), 1) for layer in layers)
        # a layer can differ in kind from the layer before it only at the layer numbers in `changes`
        changes = [self.adapt.first_layer]
        if self.experts:
            changes.append(self.dense_layers)
        cuts = sorted({layers.start, *(at for at in changes if at in layers), layers.stop})
        pairs = itertools.pairwise(cuts)
        return tuple(LayerRun(self.kind_of(start), stop - start) for start, stop in pairs)

    @property
    def quantize(self) -> QuantizeConfig:
        """Return the format of the quantized matrices in the layers. If the matrices are not
        quantized, the field `weights` of the result is "none".
        """
        return self._quantize

    @property
    def scaling(self) -> Scaling:
        """Return which numbers share a scale if the linear layers inside the transformer layers
        compute in 8-bit floating point; "none" if they compute in the type of the activations."""
        return self._scaling

    @property
    def divides_products(self) -> bool:
        """Return True if a linear layer may be computed by several matrix products, each for some
        of its outputs. If the weights are quantized or rounded to 8-bit floating point, the result
        is False, because each product would unpack or round the whole weight again."""
        return self.quantize.weights == "none" and self.scaling == "none"

    def adapted(
        self,
        adapt: AdaptConfig,
        quantize: QuantizeConfig | None = None,
        scaling: Scaling = "none",
    ) -> Self:
        """Return a copy of the model with the adapters `adapt`, with its matrices in the format
        `quantize`, and with the scales `scaling` in the matrix products of its linear layers. The
        matrices are not quantized if `quantize` is None.
        """
        copy = self.model_copy()
        copy._adapt, copy._quantize = adapt, quantize or QuantizeConfig()
        copy._scaling = scaling
        return copy

    @property
    def attention_width(self) -> int:
        """Return the number of heads times the head size: the width of all queries."""
        return self.heads * self.head_size

    @property
    def latent(self) -> bool:
        """Return True if the layers have multi-head latent attention, whose keys and values are
        computed from a vector of `kv_lora_rank` elements for each position."""
        return LATENT in self.sublayers

    @property
    def rotary_size(self) -> int:
        """Return the number of elements of a query or key head that RoPE rotates."""
        return self.rope_head_size or self.head_size

    @property
    def value_size(self) -> int:
        """Return the number of elements of a head's values at one position."""
        return self.value_head_size or self.head_size

    @property
    def values_width(self) -> int:
        """Return the number of inputs of the linear layer after attention: the number of heads
        times the size of a head's values."""
        return self.heads * self.value_size

    @property
    def gates(self) -> int:
        """Return the number of parts of equal width in the output of the MLP's first linear layer:
        2 in a gated MLP, where one part gates the other, otherwise 1.
        """
        return 2 if self.activation in GATED else 1

    @property
    def mlps(self) -> tuple[str, ...]:
        """Return the names of the MLPs of a layer, as adapters name them in `adapt.targets`: the
        MLP, or the experts and the shared experts."""
        if not self.experts:
            return (MLP,)
        return (EXPERTS, f"{MLP}.shared") if self.shared_experts else (EXPERTS,)

    @property
    def qkv_bias(self) -> bool:
        """Return True if the linear layer of queries, keys and values has a bias."""
        return self.bias in (True, "attention", "qkv")

    @property
    def attention_bias(self) -> bool:
        """Return True if the linear layer after attention has a bias."""
        return self.bias in (True, "attention")

    @property
    def mlp_bias(self) -> bool:
        """Return True if the linear layers of the MLP have biases."""
        return self.bias in (True, "mlp")

    @property
    def head_bias(self) -> bool:
        """Return True if the heads of a masked model (see `masked`) have biases."""
        return self.bias is True

    @property
    def attention_scale(self) -> float:
        """Return the factor by which the products of queries and keys are multiplied before the
        softmax. Without muP the factor is 1 / sqrt(head size). With muP, the result is the factor
        of the base model, multiplied by (head size of the base model / head size). If the key
        `query_scalar` is set, its value replaces the head size in 1 / sqrt(head size). With
        `rope_mscale` = m the result is multiplied by (0.1 m ln(rope_factor) + 1)^2 (DeepSeek-AI
        2024, V2: arXiv 2405.04434, section 3.1.4)."""
        base = self.mup_base_head_size or self.head_size
        growth = 0.1 * self.rope_mscale * math.log(max(1.0, self.rope_factor)) + 1.0
        return growth**2 * base / self.head_size / math.sqrt(self.query_scalar or base)

    @property
    def width_ratio(self) -> float:
        """Return how many times wider the model is than the base model of muP; 1 without muP."""
        return self.hidden / (self.mup_base_hidden or self.hidden)

    @property
    def matrix_std(self) -> float:
        """Return the initial standard deviation of the layers' matrices: `init_std`, which muP
        divides by the square root of the width ratio (`ptdmpi.config.mup`)."""
        return self.init_std / math.sqrt(self.width_ratio)

    def window_of(self, layer: int) -> int:
        """Return the size of the attention window of layer number `layer`: the maximum number of
        keys that a query attends to, including the key at its own position. The result is 0 if a
        query attends to all earlier keys.
        """
        slides = self.sliding_layers == "all"
        if self.sliding_layers == "even":
            slides = layer % 2 == 0
        elif not slides:
            slides = layer in self.sliding_layers
        # a window that is as long as a sample has no effect, so return 0 (no window), because
        # attention kernels without a window are faster
        if slides and self.sliding_window < self.seq_length:
            return self.sliding_window
        return 0

    @property
    def mean_keys(self) -> float:
        """Return the number of keys that a query can attend to, averaged over the layers. In one
        layer this number is the size of the window, or the sequence length s if the layer has no
        window.
        """
        if self.sliding_window == 0 or self.sliding_window >= self.seq_length:
            return self.seq_length
        if self.sliding_layers == "all":
            return self.sliding_window
        layers = self.sliding_layers
        sliding = -(-self.layers // 2) if layers == "even" else len(set(layers))
        whole = self.layers - sliding
        return (sliding * self.sliding_window + whole * self.seq_length) / self.layers

    @property
    def masked(self) -> bool:
        """Return True if the model is trained on masked tokens. A masked model attends to the
        tokens on both sides, and therefore cannot predict the next token.
        """
        return self.attention == "bidirectional"

    @property
    def router_losses(self) -> tuple[str, ...]:
        """Return the names of the auxiliary losses of the experts' routers. The result is empty if
        the model has no such losses. Each loss is summed over the layers. With adapters the routers
        are frozen, and have no losses.
        """
        if self.adapt.adapts:
            return ()
        by_balance = {"sequence": ("sequence_balance",), "batch": ("batch_balance",)}
        names = by_balance.get(self.balance, ()) if self.experts else ()
        return (*names, "router_z") if self.z_loss_coefficient > 0 else names

    @property
    def classifies(self) -> bool:
        """Return True if the model's head computes scores for a complete sequence: one score for
        each class, or one score for a candidate answer.
        """
        return self.output_head == "classes"

    @property
    def text_length(self) -> int:
        """Return the number of text tokens in a sample. A sample of a masked model also has special
        tokens at the start, between segments and at the end.
        """
        if not self.masked:
            return self.seq_length
        if self.sentence_order:
            return self.seq_length - 3
        return self.seq_length - 2

    def predictions(self, mask_fraction: float = MASK_FRACTION) -> int:
        """Return the maximum number of positions in a sequence for which the head computes a
        prediction. A classifier has 1 such position. A model that predicts the next token has
        `seq_length` positions, and a masked model has the fraction `mask_fraction` of the text."""
        if self.classifies:
            return 1
        if not self.masked:
            return self.seq_length
        return max(1, round(mask_fraction * self.text_length))


def _sound(size: Any) -> bool:
    """Return True if `size` is a legal count, so that the defaults of other sizes can be computed
    from `size`."""
    return type(size) is int and 0 < size <= MOST


def default_ffn_hidden(model: Mapping[str, Any]) -> int:
    """Return the default width of the MLP for the hidden size h in `model`: 4 h, or 8/3 h rounded
    up to a multiple of 256 for a gated MLP (LLaMA, arXiv 2302.13971, sec. 2.2).
    """
    hidden = model["hidden"]
    if model.get("activation") in GATED:
        return -(-8 * hidden // 3 // 256) * 256
    return 4 * hidden
