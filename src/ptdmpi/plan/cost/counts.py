"""Closed forms of what a model costs: parameters and FLOPs."""

from ptdmpi.config import ModelConfig


def layer_forward_flops(model: ModelConfig) -> float:
    """FLOPs of one layer's forward pass per token: its GEMMs, attention over all s positions (or
    its window).

    24 h^2 + 4 s h for a GPT (Narayanan et al. 2021, appendix); gated and grouped-query shapes count
    their own GEMMs.
    """
    h, kv = model.hidden, model.kv_heads * model.head_size
    weights = 2 * h * (model.attention_width + kv) + (model.gates + 1) * h * model.ffn_hidden
    return 2 * weights + core_forward_flops(model)


def core_forward_flops(model: ModelConfig) -> float:
    """FLOPs of the two products of attention of one layer per token, the mean over the layers: all
    s positions, or the window where a layer has one."""
    keys = [model.window_of(layer) or model.seq_length for layer in range(model.layers)]
    return 4 * model.attention_width * sum(keys) / len(keys)


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


def norm_parameters(model: ModelConfig) -> int:
    return (2 if model.norm == "layernorm" else 1) * model.hidden


def embedding_parameters(model: ModelConfig) -> int:
    """Beside the vocabulary's table; on every tensor rank: positions, token types, norm."""
    rows = model.seq_length if model.positions == "learned" else 0
    return (rows + model.token_types) * model.hidden + model.embedding_norm * norm_parameters(model)


def head_parameters(model: ModelConfig) -> int:
    """Beside the output's table and bias; on every tensor rank: final norm, BERT's transform, and
    pooler and sentence order."""
    h, count = model.hidden, norm_parameters(model) if model.block_norm != "post" else 0
    square = h * h + h * model.head_bias
    if model.output_head == "mlm":
        count += square + norm_parameters(model)
    if model.sentence_order:
        count += square + 2 * h + 2 * model.head_bias
    return count


def output_biases(model: ModelConfig, vocab_size: int) -> int:
    return vocab_size if model.output_head == "mlm" and model.head_bias else 0


def parameter_count(model: ModelConfig, vocab_size: int) -> int:
    """Parameters of the whole model, a tied head counted once."""
    h, ffn, gates = model.hidden, model.ffn_hidden, model.gates
    query, kv = model.attention_width, model.kv_heads * model.head_size
    norms = 4 if model.block_norm == "sandwich" else 2
    layer = 2 * h * (query + kv) + (gates + 1) * h * ffn + norms * norm_parameters(model)
    layer += 2 * model.qk_norm * (norm_parameters(model) // h * model.head_size)
    layer += model.qkv_bias * (query + 2 * kv) + model.attention_bias * h
    layer += model.mlp_bias * (gates * ffn + h)
    tables = vocab_size * h * (1 if model.tie_embeddings else 2) + output_biases(model, vocab_size)
    return model.layers * layer + tables + embedding_parameters(model) + head_parameters(model)
