"""Rules about multi-head latent attention: the sizes of the compressed vectors and of the heads."""

from collections.abc import Iterator

from ptdmpi.config.kinds import LATENT
from ptdmpi.config.model import ModelConfig

KEYS = ("q_lora_rank", "kv_lora_rank", "rope_head_size", "value_head_size")


def latent_rules(model: ModelConfig) -> Iterator[str]:
    """Yield the mistakes in the keys about latent attention, and in their combinations with other
    keys of [model]."""
    if not model.latent:
        for key in KEYS:
            if value := getattr(model, key):
                yield (
                    f"model.{key} = {value} has no effect without the sublayer {LATENT}; legal: 0, "
                    f'or model.sublayers = ["{LATENT}", "mlp"]'
                )
        return
    if "attention" in model.sublayers:
        yield f"model.sublayers names attention and {LATENT}; legal: one of the two"
    if not model.kv_lora_rank:
        yield (
            f"model.kv_lora_rank = 0, but the sublayer {LATENT} compresses keys and values to this "
            "number of elements; legal: 1 or more"
        )
    yield from _head_rules(model)
    needed = {
        "norm": "rmsnorm",
        "positions": "rope",
        "kv_heads": model.heads,
        "qk_norm": False,
        "block_norm": "sandwich" if model.block_norm == "sandwich" else "pre",
    }
    for key, legal in needed.items():
        value = getattr(model, key)
        if value != legal:
            yield f"model.{key} = {value!r} cannot be combined with {LATENT}; legal: {legal!r}"


def _head_rules(model: ModelConfig) -> Iterator[str]:
    """Yield the mistakes in the sizes of a head: in its rotated part, and in its values."""
    size = model.head_size
    if size and not 2 <= model.rope_head_size < size:
        yield (
            f"model.rope_head_size = {model.rope_head_size} must be at least 2 and less than "
            f"model.head_size = {size}, because a head also has elements that are not rotated"
        )
    if model.rope_head_size % 2:
        yield f"model.rope_head_size = {model.rope_head_size} must be even"
    if size and model.value_head_size > size:
        yield (
            f"model.value_head_size = {model.value_head_size} is more than model.head_size = "
            f"{size}; legal: 1 to {size}, or 0 for model.head_size"
        )
