"""Kinds of models and kinds of layers. The kind of a model determines the default values of the
keys of [model]. All layers of one kind have the same operators, parameters and costs; only their
attention windows may differ."""

import itertools
from collections.abc import Iterable
from typing import Any, NamedTuple

LATENT = "latent_attention"  # name of the sublayer of multi-head latent attention.
# Default values that several kinds of model share.
_DECODER = {
    "attention": "causal",
    "block_norm": "pre",
    "embedding_norm": False,
    "output_head": "linear",
    "token_types": 0,
    "sentence_order": False,
    "norm_eps": 1e-5,
}
_LLAMA = {
    **_DECODER,
    "norm": "rmsnorm",
    "activation": "swiglu",
    "positions": "rope",
    "bias": False,
    "tie_embeddings": False,
}
_QWEN = {**_LLAMA, "norm_eps": 1e-6, "rope_theta": 1e6}
# Kind of model (`model.kind`) -> the default values of other keys of [model]. Values that the user
# gives override these defaults.
MODEL_KINDS: dict[str, dict[str, Any]] = {
    "gpt": {
        **_DECODER,
        "norm": "layernorm",
        "activation": "gelu",
        "positions": "learned",
        "bias": True,
        "tie_embeddings": True,
    },
    "llama": _LLAMA,
    # Jiang et al. 2023 (arXiv 2310.06825)
    "mistral": {**_LLAMA, "sliding_window": 4096},
    # Yang et al. 2024 (arXiv 2407.10671; 2.5: 2412.15115), and 2025 (arXiv 2505.09388)
    "qwen2": {**_QWEN, "bias": "qkv"},
    "qwen3": {**_QWEN, "qk_norm": True},
    # Gemma Team 2024 (arXiv 2408.00118), section 2 and Table 1
    "gemma2": {
        **_LLAMA,
        "norm_eps": 1e-6,
        "zero_centered_norm": True,
        "block_norm": "sandwich",
        "activation": "geglu",
        "tie_embeddings": True,
        "scale_embedding": True,
        "sliding_window": 4096,
        "sliding_layers": "even",
        "attention_softcap": 50.0,
        "logit_softcap": 30.0,
    },
    # DeepSeek-AI 2024 (V3: arXiv 2412.19437), section 2.1
    "deepseek": {
        **_LLAMA,
        "norm_eps": 1e-6,
        "sublayers": (LATENT, "mlp"),
        "rope_head_size": 64,
    },
    # Devlin et al. 2019 (arXiv 1810.04805), with the sentence order of Lan et al. 2020
    "bert": {
        "norm": "layernorm",
        "activation": "gelu_exact",
        "positions": "learned",
        "bias": True,
        "tie_embeddings": True,
        "attention": "bidirectional",
        "block_norm": "post",
        "embedding_norm": True,
        "output_head": "mlm",
        "token_types": 2,
        "sentence_order": True,
        "norm_eps": 1e-12,
    },
}


class LayerKind(NamedTuple):
    """The properties in which the layers of a model differ. `mixes` is True if the layer has
    experts. `idle` is True if the layer comes before the first layer with adapters, and therefore
    has no backward pass."""

    mixes: bool = False
    idle: bool = False


class LayerRun(NamedTuple):
    """A run of layers: `layers` neighbouring layers of the same kind."""

    kind: LayerKind
    layers: int


Runs = tuple[LayerRun, ...]


def merged(runs: Iterable[LayerRun]) -> Runs:
    """Return `runs` with neighbouring runs of the same kind merged into one run."""
    groups = itertools.groupby(runs, key=lambda run: run.kind)
    return tuple(LayerRun(kind, sum(run.layers for run in group)) for kind, group in groups)


def count_of(runs: Iterable[LayerRun]) -> int:
    """Return the total number of layers in `runs`."""
    return sum(run.layers for run in runs)


def mixing_layers(layers: int, dense_layers: int, moe_every: int) -> tuple[int, ...]:
    """Return the numbers of the layers with experts, in a model that has experts. The first
    `dense_layers` layers have no experts. Any other layer has experts if its number, counted from
    1, is a multiple of `moe_every`. The returned numbers count from 0.
    """
    return tuple(n for n in range(dense_layers, layers) if (n + 1) % moe_every == 0)


def trained_runs(runs: Iterable[LayerRun]) -> Runs:
    """Return the runs whose layers have a backward pass."""
    return tuple(run for run in runs if not run.kind.idle)
