"""Closed forms of a model's work in FLOPs."""

from ptdmpi.config import ModelConfig
from ptdmpi.plan.shape.parameters import Linear, layer


def layer_forward_flops(model: ModelConfig) -> float:
    """FLOPs of one layer's forward pass per token: its GEMMs, attention over all s positions (or
    its window).

    24 h^2 + 4 s h for a GPT (Narayanan et al. 2021, appendix); gated and grouped-query shapes count
    their own GEMMs.
    """
    linears = [part for part in layer(model).values() if isinstance(part, Linear)]
    weights = sum(linear.inputs * sum(linear.outputs) for linear in linears)
    return 2 * weights + core_forward_flops(model)


def core_forward_flops(model: ModelConfig) -> float:
    """FLOPs of the two products of attention of one layer per token, the mean over the layers: all
    s positions, or the window where a layer has one."""
    # q k^T and weights v, two FLOPs (multiply and add) for each of their products
    return 4 * model.attention_width * model.mean_keys


def head_forward_flops(model: ModelConfig, vocab_size: int) -> float:
    """FLOPs of the output head's forward pass per token: 2 V h; of a masked model at the share of
    positions that it is asked for (at the default fraction), BERT's transform with it."""
    h = model.hidden
    work = 2 * vocab_size * h + (2 * h * h if model.output_head == "mlm" else 0)
    return work * model.predictions() / model.seq_length


def model_flops(model: ModelConfig, vocab_size: int, tokens: int) -> float:
    """Model FLOPs of forward and backward over `tokens`, recomputation not counted.

    For a GPT, 72 B l s h^2 (1 + s/6h + V/12lh) (Korthikanti et al. 2022, arXiv 2205.05198,
    appendix A): the backward pass counts twice the forward.
    """
    per_token = model.layers * layer_forward_flops(model) + head_forward_flops(model, vocab_size)
    return 3 * per_token * tokens


def hardware_flops(
    model: ModelConfig, vocab_size: int, tokens: int, recompute: str, layers: int
) -> float:
    """Model FLOPs plus what `layers` of the layers compute again: under "full" their forward pass,
    under "selective" the two products of attention.

    With every layer in full, 96 B l s h^2 (1 + s/6h + V/16lh) (Narayanan et al. 2021, equation 3).
    """
    core = core_forward_flops(model)
    again = {"none": 0.0, "selective": core, "full": layer_forward_flops(model)}[recompute]
    return model_flops(model, vocab_size, tokens) + layers * again * tokens
