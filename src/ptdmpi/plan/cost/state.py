"""What a rank keeps of the model between steps: weights, masters, gradients, moments."""

from ptdmpi.plan.cost import counts
from ptdmpi.plan.cost.memory import Item, Sizes, stages_of


def _layer_parameters(sizes: Sizes) -> int:
    """Of one layer on one tensor rank; norms and the biases behind a sum stand on every rank."""
    model = sizes.config.model
    h, query = model.hidden, sizes.share(model.hidden)
    key_value = sizes.share(model.kv_heads * model.head_size)
    ffn = sizes.share(model.ffn_hidden)
    up = (2 if model.activation == "swiglu" else 1) * ffn
    weights = h * (query + 2 * key_value) + query * h + h * up + ffn * h
    biases = model.attention_bias * (query + 2 * key_value + h) + model.mlp_bias * (up + h)
    return weights + biases + 2 * counts.norm_parameters(model)


def state_bytes(sizes: Sizes, vocab_size: int, pipeline_rank: int) -> list[Item]:
    """Weights, master weights, gradients and AdamW's moments of one rank.

    The buffers' alignment is left out. A tied head on the rank of the embedding has no weights of
    its own but gradients. Where compute and master type agree there is one set of weights.
    """
    model, wide = sizes.config.model, sizes.wide_bytes
    stages = stages_of(sizes.config, vocab_size, pipeline_rank).values()
    table = sizes.share(vocab_size) * model.hidden
    first = any(layers.start == 0 for layers in stages)
    last = any(layers.stop == model.layers for layers in stages)
    count = sum(map(len, stages)) * _layer_parameters(sizes)
    if first:
        count += table + counts.embedding_parameters(model)
    if last:
        count += counts.head_parameters(model)
        count += sizes.share(counts.output_biases(model, vocab_size))
    shared = table if first and last and model.tie_embeddings else 0
    if last and not shared:
        count += table
    items = [] if sizes.compute_bytes == wide else [Item("weights", count, sizes.compute_bytes)]
    return [
        *items,
        Item("master_weights", count, wide),
        Item("gradients", count + shared, wide),
        Item("first_moments", count, wide),
        Item("second_moments", count, wide),
    ]
