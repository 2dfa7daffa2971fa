"""The rules that a layout must satisfy, and the error messages for layouts that break a rule."""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

from ptdmpi.base.near import divisors, nearest
from ptdmpi.base.words import counted
from ptdmpi.config.choices import (
    CHUNKS,
    OFFLOADS,
    RECOMPUTE_MODES,
    SCHEDULES,
    SPLITTING,
    usable_schedules,
)
from ptdmpi.config.layout import Layout
from ptdmpi.config.model import ModelConfig
from ptdmpi.config.zero import STAGES, covers_gradients, covers_state

# The maximum number of forward ops in a step, summed over all stages. A step has as many backward
# ops. The ops of a step are listed in order before the run starts. Listing 250,000 forward ops
# takes a second or two.
MOST_FORWARDS = 250_000


def shard_groups(data: int, context: int) -> list[int]:
    """Return the legal sizes of a shard group in ascending order. A shard group has some context
    ranks at one position on the data axis (the size divides `context`), or all context ranks at
    several positions on the data axis (the size is `context` times a divisor of `data`).
    """
    return sorted({*divisors(context), *(context * size for size in divisors(data))})


def expert_groups(layout: Layout) -> list[int]:
    """Return the legal numbers of ranks over which experts are distributed (`parallel.expert`), in
    ascending order. `layout` gives all other sizes. If tensor ranks divide each expert, the legal
    values are those of `shard_groups`. Otherwise, experts are distributed over some tensor ranks,
    or over all tensor ranks at several positions on the context and data axes."""
    groups, tensor = shard_groups(layout.data, layout.context), layout.dealing.tensor
    return sorted({*divisors(tensor), *(tensor * size for size in groups)})


def groups_to_shard(layout: Layout) -> list[int]:
    """Return the legal sizes of a shard group in this layout, in ascending order. A shard group
    contains only ranks that have the same experts."""
    data = max(1, layout.data // layout.expert_data)
    return shard_groups(data, layout.context // layout.expert_context)


def shards_of_a_node(data: int, near: int, *, context: int = 1) -> int:
    """Return the size of shard groups that stay on one node. There are `context` * `data` ranks
    that compute with the same weights, and each node has `near` of these ranks.

    If all of these ranks are on one node, they are one group. Otherwise the size is the largest
    legal size above 1 that divides `near`. If there is no such size, for example with 3 ranks on a
    node and 8 data ranks, the result is the largest legal size up to `near`. In this case some
    groups have ranks on two nodes.
    """
    if context * data <= near:
        return context * data
    sizes = [size for size in shard_groups(data, context) if size <= max(1, near)]
    return max(sizes, key=lambda size: (size > 1 and near % size == 0, size))


class Rule(NamedTuple):
    """A rule about layouts, checked for one layout: the rule's short name, whether the layout
    breaks it, and the error message.
    """

    name: str
    broken: bool
    text: Callable[[], str]


def chunk_rule(schedule: str, virtual: int) -> Rule:
    """Return the rule for the number of model chunks per rank: one for the schedules 1F1B and
    ZB-H1, two for ZB-V, and any number for GPipe and the interleaved schedule (Narayanan et al.
    2021, section 2; Qi et al. 2023, arXiv 2401.10241, sections 2.3 and 6).
    """
    chunks = CHUNKS.get(schedule, virtual)
    return Rule(
        "chunks",
        virtual != chunks,
        lambda: (
            f'schedule = "{schedule}" has virtual = {chunks}, not {virtual}; '
            f"legal: schedule = {usable_schedules(virtual)}, or virtual = {chunks}"
        ),
    )


def layout_mistakes(layout: Layout, model: ModelConfig | None, batch: int | None) -> Iterator[str]:
    """Yield the reasons why a layout is not legal for this model and global batch. Each reason also
    names legal values. Yield nothing if the layout is legal. Rules about the model or the batch are
    skipped if `model` or `batch` is None."""
    return (rule.text() for rule in rules_of(layout, model, batch) if rule.broken)


def is_legal(layout: Layout, model: ModelConfig | None, batch: int | None) -> bool:
    """Return True if the layout is legal, that is, if `layout_mistakes` would yield nothing. This
    function is faster than `layout_mistakes`, because it makes no error messages.
    """
    return not any(rule.broken for rule in rules_of(layout, model, batch))


def breaks(layout: Layout, *names: str) -> bool:
    """Return True if a layout breaks one of the rules named `names`. Only rules that need neither a
    model nor a batch size are checked."""
    return any(rule.broken for rule in rules_of(layout, None, None) if rule.name in names)


def rules_of(layout: Layout, model: ModelConfig | None, batch: int | None) -> Iterator[Rule]:
    """Yield every rule about a layout, whether the layout breaks the rule or not. Rules about the
    model or the batch are skipped if `model` or `batch` is None.
    """
    chunks = chunk_rule(layout.schedule, layout.virtual)
    yield chunks._replace(text=lambda: f"parallel.{chunks.text()}")
    if model is not None:
        yield from _model_rules(layout, model)
    yield from _setting_rules(layout)
    yield from _recompute_rules(layout, model)
    if batch is not None:
        yield from _batch_rules(layout, batch)


def _model_rules(layout: Layout, model: ModelConfig) -> Iterator[Rule]:
    yield _divides(layout, "heads", model.heads)
    yield _key_heads(layout, model)
    if model.experts:
        yield _divides(layout, *_divided_width(layout, model))
    if model.has_dense_layers:
        yield _divides(layout, "ffn_hidden", model.ffn_hidden)
    yield _chunks(layout, model)
    yield from _expert_rules(layout, model)
    yield _dealt_heads(layout, model)
    yield _own_tokens(layout, model)
    yield Rule(
        "sequence",
        layout.sequence_parallel and model.seq_length % layout.tensor > 0,
        lambda: (
            f"sequence_parallel: parallel.tensor = {layout.tensor} does not divide "
            f"model.seq_length = {model.seq_length}; legal nearby: "
            f"{nearest(layout.tensor, divisors(model.seq_length))}"
        ),
    )
    yield Rule(
        "stages",
        layout.stages > model.layers,
        lambda: (
            f"parallel.pipeline * virtual = {layout.stages} stages, but model.layers = "
            f"{model.layers}; at most one stage per layer"
        ),
    )
    if model.quantize.weights != "none":
        yield _blocks(layout, model)
    first = layout.first_layers
    most = model.layers - layout.stages + 1
    yield Rule(
        "first_layers",
        first is not None and (layout.stages < 2 or not 1 <= first <= most),
        lambda: (
            f"parallel.first_layers = {first}: "
            + (f"legal: 1 to {most}" if layout.stages > 1 else 'there is one stage; legal: "auto"')
        ),
    )


def _divided_width(layout: Layout, model: ModelConfig) -> tuple[str, int]:
    """Return the width that the tensor axis divides in a layer with experts, as two values: the
    keys of [model] that determine the width, and the width. If experts are not divided, the tensor
    axis divides only the shared experts, which are computed as one MLP.
    """
    if layout.dealing.whole:
        return "shared_experts * expert_hidden", model.shared_experts * model.expert_hidden
    return "expert_hidden", model.expert_hidden


def _own_tokens(layout: Layout, model: ModelConfig) -> Rule:
    """Return the rule for undivided experts: the tensor-parallel size divides the number of
    positions on a context rank. The positions must be divisible, because each tensor rank sends the
    tokens at an equal number of these positions to the experts."""
    each = model.seq_length // layout.context
    return Rule(
        "expert_tokens",
        layout.dealing.whole and not layout.sequence_parallel and each % layout.tensor > 0,
        lambda: (
            f"parallel.expert_tensor = 1: parallel.tensor = {layout.tensor} does not divide the "
            f"{each} positions of a sequence on a rank; legal nearby: tensor "
            f'{nearest(layout.tensor, divisors(each))}, or expert_tensor = "all"'
        ),
    )


def _chunks(layout: Layout, model: ModelConfig) -> Rule:
    """Return the rule that a sequence can be divided into two chunks of equal length for each
    context rank. Each rank has an early and a late chunk, which balances causal attention. With
    sequence parallelism the number of tensor ranks must also divide the length of a chunk.
    """
    unit = 2 * layout.context
    words = "2 * parallel.context"
    if layout.sequence_parallel and layout.tensor > 1:
        unit *= layout.tensor
        words += " * tensor"

    def text() -> str:
        below = model.seq_length // unit * unit
        legal = [length for length in (below, below + unit) if length]
        return (
            f"parallel.context = {layout.context}: {words} = {unit} does not divide "
            f"model.seq_length = {model.seq_length}; legal nearby: seq_length "
            f"{nearest(model.seq_length, legal)}"
        )

    return Rule("context", layout.context > 1 and model.seq_length % unit > 0, text)


def _expert_rules(layout: Layout, model: ModelConfig) -> Iterator[Rule]:
    """Yield three rules. Without experts in the model, `parallel.expert_tensor` must not be set,
    and `parallel.expert` must be 1. With experts, every rank must get the same number of experts.
    """
    expert, experts = layout.expert, model.experts
    yield Rule(
        "no_experts",
        layout.expert_tensor is not None and experts == 0,
        lambda: (
            f"parallel.expert_tensor = {layout.expert_tensor} is for experts, but model.experts "
            '= 0; legal: expert_tensor = "all"'
        ),
    )
    yield Rule(
        "no_experts",
        expert > 1 and experts == 0,
        lambda: (
            f"parallel.expert = {expert} distributes experts over ranks, but model.experts = 0; "
            "legal: expert = 1"
        ),
    )
    yield Rule(
        "experts",
        experts % expert > 0,
        lambda: (
            f"parallel.expert = {expert} does not divide model.experts = {experts}; legal nearby: "
            f"expert {nearest(expert, divisors(experts))}"
        ),
    )


def _dealt_heads(layout: Layout, model: ModelConfig) -> Rule:
    """Return the rule that with the context method "ulysses" each context rank gets equally many
    query heads: the context-parallel size divides the number of heads on a tensor rank."""
    heads = model.heads // layout.tensor

    def text() -> str:
        legal = nearest(layout.context, divisors(heads))
        return (
            f'parallel.context_method = "ulysses": parallel.context = {layout.context} does not '
            f"divide the {counted(heads, 'head')} of a tensor rank; legal nearby: context {legal}, "
            'or context_method = "all_gather"'
        )

    deals = layout.exchange == "ulysses" and not model.heads % layout.tensor
    return Rule("dealt_heads", deals and heads % layout.context > 0, text)


def _key_heads(layout: Layout, model: ModelConfig) -> Rule:
    """Return the rule that the tensor-parallel size t divides the number of key heads. If there are
    more tensor ranks than key heads, t must be a multiple of the number of key heads, so that
    equally many ranks have a copy of each head.
    """
    tensor = layout.tensor
    heads = model.kv_heads

    def text() -> str:
        """Return the error message, with the nearest legal values."""
        legal = [k for k in divisors(model.heads) if not (heads % k and k % heads)]
        return (
            f"parallel.tensor = {tensor} neither divides model.kv_heads = {heads} nor is "
            f"a multiple of it; legal nearby: tensor {nearest(tensor, legal)}"
        )

    uneven = heads % tensor > 0 and tensor % heads > 0
    return Rule("kv_heads", uneven and not model.heads % tensor, text)


def _blocks(layout: Layout, model: ModelConfig) -> Rule:
    """Return the rule that no quantized block is divided between tensor ranks. A block consists of
    the weights of one output for neighbouring inputs of a linear layer. This rule assumes that the
    number of tensor ranks divides the widths; other rules check this assumption."""
    tensor = layout.tensor
    block = model.quantize.block
    divided = (model.values_width, model.ffn_hidden)
    widths = (model.hidden, *(width // tensor for width in divided))
    widths += tuple(filter(None, (model.q_lora_rank, model.kv_lora_rank)))

    def text() -> str:
        """Return the error message, with the nearest legal values."""
        legal = [size for size in divisors(math.gcd(*widths)) if size % 2 == 0]
        remedy = "legal: none here"
        if legal:
            remedy = f"legal nearby: {nearest(block, legal)}"
            if model.adapt.adapts:
                remedy += ", with an adapt.base made by ptdmpi quantize --block of this size"
        return (
            f"quantize.block = {block} does not divide the inputs of all linears on a tensor rank "
            f"({', '.join(map(str, widths))}); {remedy}"
        )

    even = not any(width % tensor for width in divided)
    return Rule("block", even and any(width % block for width in widths), text)


def _divides(layout: Layout, key: str, size: int) -> Rule:
    return Rule(
        key,
        size % layout.tensor > 0,
        lambda: (
            f"parallel.tensor = {layout.tensor} does not divide model.{key} = {size}; "
            f"legal nearby: tensor {nearest(layout.tensor, divisors(size))}"
        ),
    )


def _setting_rules(layout: Layout) -> Iterator[Rule]:
    """Yield the rules that depend only on the layout, and not on a model or a batch size."""
    known = (("schedule", SCHEDULES), ("recompute", RECOMPUTE_MODES), ("offload", OFFLOADS))
    for key, legal in known:
        value = getattr(layout, key)
        yield Rule(
            key,
            value not in legal,
            partial(_unknown, key, value, legal),
        )
    yield Rule(
        "zero", layout.zero not in STAGES, lambda: f"zero = {layout.zero}: must be 0, 1, 2 or 3"
    )
    yield Rule(
        "expert_tensor",
        layout.expert_tensor not in (None, 1, layout.tensor),
        lambda: (
            f"parallel.expert_tensor = {layout.expert_tensor}: either all tensor ranks divide each "
            'expert, or none; legal: 1 or "all"'
        ),
    )
    yield _expert_ranks(layout)
    yield from _shard_rules(layout)


def _expert_ranks(layout: Layout) -> Rule:
    """Return the rule that the experts are distributed over some context ranks of one data rank, or
    over all context ranks of some data ranks. If the tensor ranks do not divide experts,
    `expert_groups` gives the rule.
    """
    expert, legal = layout.expert, expert_groups(layout)

    def text() -> str:
        words = f"the data axis, {layout.data}"
        if layout.dealing.whole:
            words = (
                f"t = {layout.tensor}, and is not t times a divisor of c = {layout.context}, or "
                f"t c times a divisor of d = {layout.data}"
            )
        elif layout.context > 1:
            words = f"c = {layout.context}, and is not c times a divisor of d = {layout.data}"
        return (
            f"parallel.expert = {expert} does not divide {words}; legal nearby: "
            f"{nearest(expert, legal)}"
        )

    return Rule("expert", expert not in legal, text)


def dear(layout: Layout, batch: int) -> Iterator[str]:
    """Yield a warning for each setting of a legal layout that makes a step unexpectedly slow."""
    microbatches = layout.microbatches(batch)
    if layout.shards_gradients and microbatches > 1:
        gathered = ", and gathers weights up to twice as often" if layout.shards_weights else ""
        yield (
            f"warning: parallel.zero = {layout.zero} sums gradients {microbatches} times a step, "
            f"once for each microbatch{gathered}; zero = 1 sums them once, and a larger "
            "batch.micro_size makes fewer microbatches"
        )


def groups_need_zero(group: int | str) -> str:
    """Return the error message for a layout that sets a size of shard groups but shards nothing.
    `group` is this size: a number, or "node"."""
    said = f'"{group}"' if isinstance(group, str) else group
    return (
        f"parallel.shard_group = {said} has an effect only with parallel.zero = 1, 2 or 3; legal "
        'with zero = 0: shard_group = "all"'
    )


def _group_text(layout: Layout) -> str:
    axes = f"the data axis, {layout.data}"
    if layout.expert > 1:
        axes = f"the {counted(layout.copies, 'rank')} with the same experts"
    elif layout.context > 1:
        axes = f"c = {layout.context}, and is not c times a divisor of d = {layout.data}"
    sizes = groups_to_shard(layout)
    return (
        f"parallel.shard_group = {layout.shard_group} does not divide {axes}; "
        f'legal nearby: {nearest(layout.shard_group or 1, sizes)}, or "all"'
    )


def _shard_rules(layout: Layout) -> Iterator[Rule]:
    group = layout.shard_group
    yield Rule(
        "shard_group",
        group is not None and not covers_state(layout.zero),
        lambda: groups_need_zero(group or 1),
    )
    yield Rule(
        "shard_group",
        group is not None and group not in groups_to_shard(layout),
        lambda: _group_text(layout),
    )
    yield Rule(
        "zero",
        covers_gradients(layout.zero) and layout.schedule in SPLITTING,
        lambda: (
            f"parallel.zero = {layout.zero} sums a layer's gradient as soon as its backward is "
            f'done, but schedule = "{layout.schedule}" delays the gradients of weights; legal: '
            'zero = 0 or 1, or schedule = "1f1b", "interleaved" or "gpipe"'
        ),
    )


def _recompute_rules(layout: Layout, model: ModelConfig | None) -> Iterator[Rule]:
    """Yield the rules about the two keys that refine full recomputation: the number of recomputed
    layers, and the division of the layers' inputs over tensor ranks."""
    full, layers, tensor = layout.recompute == "full", layout.recompute_layers, layout.tensor
    yield Rule(
        "recompute_layers",
        not full and layers is not None,
        lambda: 'recompute.layers has an effect only with recompute.mode = "full"',
    )
    partitions, key = layout.partition_activations, "recompute.partition_activations"
    yield Rule(
        "partition_mode",
        partitions and not full,
        lambda: f'{key} has an effect only with recompute.mode = "full"',
    )
    yield Rule(
        "partition_sequence",
        partitions and layout.sequence_parallel,
        lambda: (
            f"{key}: parallel.sequence_parallel divides activations already; legal: one of these"
        ),
    )
    if model is None:
        return
    of_model = counted(model.layers, "layer")
    yield Rule(
        "recompute_layers",
        full and layers is not None and layers > model.layers,
        lambda: f"recompute.layers = {layers}: the model has {of_model}",
    )
    size = model.seq_length // layout.context * layout.micro_size * model.hidden
    yield Rule(
        "partition_size",
        partitions and size % tensor > 0,
        lambda: (
            f"{key}: parallel.tensor = {tensor} does not divide the {size} numbers of an "
            "activation (seq_length * micro_size * hidden); legal nearby: tensor "
            f"{nearest(tensor, divisors(size))}, or partition_activations = false"
        ),
    )


def _batch_rules(layout: Layout, batch: int) -> Iterator[Rule]:
    unit = layout.data * layout.micro_size
    below = batch // unit * unit
    yield Rule(
        "batch",
        batch % unit > 0,
        lambda: (
            f"batch.global_size = {batch} is not a multiple of data * micro_size = {layout.data} * "
            f"{layout.micro_size} = {unit}; legal nearby: "
            f"{nearest(batch, [n for n in (below, below + unit) if n])}"
        ),
    )
    most = max(1, MOST_FORWARDS // layout.stages)
    yield Rule(
        "length",
        layout.microbatches(batch) > most,
        lambda: (
            f"batch.global_size = {batch} gives a step {layout.microbatches(batch)} microbatches, "
            f"but with {counted(layout.stages, 'stage')} the schedule of a step may have at most "
            f"{most}; legal: a global_size of at most {most * unit}, "
            f"or a micro_size of at least {-(-batch // (most * layout.data))}"
        ),
    )


def _unknown(key: str, value: str, legal: Sequence[str]) -> str:
    return f'{key} "{value}" is unknown; legal are {", ".join(legal)}'
