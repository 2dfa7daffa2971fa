"""Closed forms of a model's work in FLOPs."""

from ptdmpi.config import ModelConfig
from ptdmpi.plan.shape.parameters import Linear, LowRankPair, head, layer


def layer_forward_flops(model: ModelConfig, number: int | None = None) -> float:
    """FLOPs of the forward pass of a layer, of this number or the last, per token: its GEMMs,
    attention over all s positions (or its window).

    24 h^2 + 4 s h for a GPT (Narayanan et al. 2021, appendix); gated and grouped-query shapes count
    their own GEMMs.
    """
    return 2 * sum(_products(model, number)) + core_forward_flops(model)


def _products(model: ModelConfig, number: int | None = None) -> tuple[int, int]:
    """Weights that a token of a layer is multiplied with: of those that train, and of frozen
    ones."""
    train = frozen = 0
    for part in layer(model, number).values():
        size = 0
        if isinstance(part, Linear):
            size = part.inputs * sum(part.outputs)
        elif isinstance(part, LowRankPair):
            size = part.rank * (part.inputs + part.outputs)
        train, frozen = train + size * part.trains, frozen + size * (not part.trains)
    return train, frozen


def core_forward_flops(model: ModelConfig) -> float:
    """FLOPs of the two products of attention of one layer per token, the mean over the layers: all
    s positions, or the window where a layer has one."""
    # q k^T and weights v, two FLOPs (multiply and add) for each of their products
    return 4 * model.attention_width * model.mean_keys


def head_forward_flops(model: ModelConfig, vocab_size: int) -> float:
    """FLOPs of the output head's forward pass per token: 2 V h; of a masked model at the share
    of positions that it is asked for (at the default fraction), BERT's transform with it; of a head
    for a task all that stands behind one position of a sequence."""
    h = model.hidden
    if model.classifies:
        parts = [part for part in head(model, vocab_size).values() if isinstance(part, Linear)]
        return 2 * sum(part.inputs * sum(part.outputs) for part in parts) / model.seq_length
    work = 2 * vocab_size * h + (2 * h * h if model.output_head == "mlm" else 0)
    return work * model.predictions() / model.seq_length


def model_flops(model: ModelConfig, vocab_size: int, tokens: int) -> float:
    """Model FLOPs of forward and backward over `tokens`, recomputation not counted.

    For a GPT, 72 B l s h^2 (1 + s/6h + V/12lh) (Korthikanti et al. 2022, arXiv 2205.05198,
    appendix A): the backward pass counts twice the forward. Of weights that do not train it counts
    once, for their input's gradient, and of layers in front of all that train not at all.
    """
    output, idle = head_forward_flops(model, vocab_size), model.idle()
    others = model.layers - idle
    per_token = 3 * (others * layer_forward_flops(model) + output)
    per_token += idle * layer_forward_flops(model, 0)
    if model.adapt.adapts:
        frozen_output = 0.0 if model.classifies else output
        per_token -= others * 2 * _products(model)[1] + frozen_output
    return per_token * tokens


def hardware_flops(
    model: ModelConfig, vocab_size: int, tokens: int, recompute: str, layers: int
) -> float:
    """Model FLOPs plus what the first `layers` layers compute again, if they have a backward: under
    "full" their forward pass, under "selective" the two products of attention.

    With every layer in full, 96 B l s h^2 (1 + s/6h + V/16lh) (Narayanan et al. 2021, equation 3).
    """
    core = core_forward_flops(model)
    again = {"none": 0.0, "selective": core, "full": layer_forward_flops(model)}[recompute]
    recomputed = layers - model.idle(range(layers))
    return model_flops(model, vocab_size, tokens) + recomputed * again * tokens
