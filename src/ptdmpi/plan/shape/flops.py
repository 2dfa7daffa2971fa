"""The FLOPs of a model, as closed formulas: sums over the matrix products of its operators."""

from ptdmpi.config import ModelConfig
from ptdmpi.config.kinds import LayerKind, trained_runs
from ptdmpi.plan.layer import describe
from ptdmpi.plan.layer.ahead import modules
from ptdmpi.plan.layer.ends import Predict
from ptdmpi.plan.layer.folds import frozen_multiplications, multiplications, operators
from ptdmpi.plan.layer.operator import Operator
from ptdmpi.plan.layer.products import Multiply


def _layer(model: ModelConfig, kind: LayerKind | None = None) -> tuple[Operator, ...]:
    if kind is None:
        kind = model.kind_of(model.layers - 1)
    return operators(describe.layer_of(model, kind))


def layer_forward_flops(model: ModelConfig, number: int | None = None) -> float:
    """Return the FLOPs per token of the forward pass of layer `number`. If `number` is None, the
    result is for the last layer.

    The result counts the linear layers, and attention over all positions of the sequence (or over
    the attention window). For a GPT with hidden size h and sequence length s, the result is 24 h^2
    + 4 s h (Narayanan et al. 2021, appendix). Gated MLPs and grouped queries, whose linear layers
    have other sizes, are counted with these sizes.
    """
    return kind_forward_flops(model, model.kind_of(model.layers - 1 if number is None else number))


def kind_forward_flops(model: ModelConfig, kind: LayerKind) -> float:
    """Return the FLOPs per token of the forward pass of a layer of kind `kind`, as in
    `layer_forward_flops`."""
    return 2 * multiplications(_layer(model, kind), model)


def core_forward_flops(model: ModelConfig) -> float:
    """Return the FLOPs per token of the two matrix products of attention in one layer, as the mean
    over the layers. Each query is counted with all positions of the sequence as keys, or, if there
    is a sliding window, with the positions in the window."""
    core = [row for row in _layer(model) if row.recomputed_selectively]
    return 2 * multiplications(core, model)


def head_forward_flops(model: ModelConfig, vocab_size: int) -> float:
    """Return the FLOPs per token of the output head's forward pass.

    The result is 2 V h, with vocabulary size V and hidden size h. For a masked language model, the
    linear layer that BERT has before its output head is also counted. This layer and the head
    process only the positions that the head predicts, so their FLOPs are multiplied by the default
    fraction of these positions. A head that computes scores for a complete sequence processes only
    one position of each sequence, so its FLOPs are divided by the sequence length. BERT's
    classifier for the order of two segments is not counted. The modules for multi-token prediction,
    which come after the last layer, are counted with all their operators.
    """
    ahead = 0.0
    for number in range(model.mtp_modules):
        ahead += 2 * multiplications(modules.module(model, vocab_size, number), model)
    products = [
        row for row in describe.head(model, vocab_size) if isinstance(row, Multiply | Predict)
    ]
    if model.classifies:
        return 2 * multiplications(products, model) / model.seq_length
    predicted = [row for row in products if isinstance(row, Predict) or row.rows == "predicted"]
    return ahead + 2 * multiplications(predicted, model) * model.predictions() / model.seq_length


def model_flops(model: ModelConfig, vocab_size: int, tokens: int) -> float:
    """Return the model FLOPs of forward and backward over `tokens` tokens, without recomputation.

    For a GPT, the result is 72 B l s h^2 (1 + s/6h + V/12lh), with B sequences of length s, l
    layers, hidden size h and vocabulary size V (Korthikanti et al. 2022, arXiv 2205.05198, appendix
    A). The backward pass has twice the FLOPs of the forward pass. Frozen weights are an exception:
    their backward pass has the same FLOPs as the forward pass, because only the gradient of the
    input is computed. Layers before the first trained layer have no backward pass.
    """
    output = head_forward_flops(model, vocab_size)
    ahead = others = frozen = 0.0
    for kind, count in model.runs():
        forward = count * kind_forward_flops(model, kind)
        if kind.idle:
            ahead += forward
            continue
        others += forward
        if model.adapt.adapts:
            frozen += count * 2 * frozen_multiplications(_layer(model, kind), model)
    if model.adapt.adapts and not model.classifies:
        frozen += output
    return (3 * (others + output) + ahead - frozen) * tokens


def hardware_flops(
    model: ModelConfig, vocab_size: int, tokens: int, recompute: str, *, layers: int
) -> float:
    """Return the model FLOPs, plus the FLOPs that the first `layers` layers spend on recomputation
    before their backward passes.

    If `recompute` is "full", these layers recompute their whole forward pass. If `recompute` is
    "selective", these layers recompute only the two matrix products of attention. If all layers are
    recomputed fully, the result for a GPT is 96 B l s h^2 (1 + s/6h + V/16lh) (Narayanan et al.
    2021, equation 3; `model_flops` defines the symbols).
    """
    again = 0.0
    for kind, count in trained_runs(model.runs(range(layers))):
        if recompute == "full":
            again += count * kind_forward_flops(model, kind)
        elif recompute == "selective":
            again += count * core_forward_flops(model)
    return model_flops(model, vocab_size, tokens) + again * tokens
