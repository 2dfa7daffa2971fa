"""What a rank keeps of final norm, output head and loss, and what these need beside."""

from collections.abc import Iterator

from ptdmpi.plan.cost.kept.activations import Item, Sizes, norm_items
from ptdmpi.plan.cost.kept.working import linear_backward
from ptdmpi.plan.shape.chunks import DEVICE_ELEMENTS


def head_activations(sizes: Sizes, vocab_size: int) -> list[Item]:
    """Final norm, output head and cross-entropy."""
    model, c = sizes.model, sizes.compute_bytes
    if model.classifies:
        return list(_classes(sizes))
    local = sizes.local_tokens * model.hidden
    logits = sizes.predicted * sizes.share(vocab_size)
    return [
        *(norm_items(sizes, "final_norm") if model.block_norm != "post" else ()),
        *(_masked_head(sizes) if model.masked else ()),
        *([] if model.masked or model.adapt.adapts else [Item("head.input", local, c)]),
        *([Item("head.tangents", logits, c)] if model.logit_softcap else ()),
        *_loss(sizes, logits),
        Item("loss.labels", sizes.predicted, 8),
        Item("loss.here", sizes.predicted, 1),
    ]


def _loss(sizes: Sizes, logits: int) -> Iterator[Item]:
    """Logits as they are, and of each row the greatest and the sum of exponentials; the programs of
    2021 keep probabilities in float32."""
    if sizes.software.attention == "flash":
        yield Item("loss.logits", logits, sizes.compute_bytes)
        yield Item("loss.statistics", 3 * sizes.predicted, sizes.wide_bytes)
    else:
        yield Item("loss.probabilities", logits, sizes.wide_bytes)


def _classes(sizes: Sizes) -> Iterator[Item]:
    """What a head for a task keeps: final norm, one position of each sequence, its scores."""
    model, c, b = sizes.model, sizes.compute_bytes, sizes.layout.micro_size
    if model.idle() < model.layers:  # else it alone has a backward
        if model.block_norm != "post":
            yield from norm_items(sizes, "final_norm")
        yield Item("head.positions", b, 8)
    yield Item("head.selected", b * model.hidden, c)
    if model.masked:
        yield Item("sentence.pooler.output", b * model.hidden, c)
        yield Item("sentence.mask", b * model.hidden * (model.dropout > 0.0), 1 + c)
    yield Item("loss.probabilities", b * model.classes, sizes.wide_bytes)


def _masked_head(sizes: Sizes) -> Iterator[Item]:
    """What is kept of the masked positions, and of the first one of each sample."""
    model, c = sizes.model, sizes.compute_bytes
    b, hidden = sizes.layout.micro_size, sizes.predicted * model.hidden
    yield Item("head.positions", sizes.predicted + b, 8)
    yield Item("head.selected", hidden + b * model.hidden, c)
    if model.output_head == "mlm":
        yield Item("mlm.activation.input", hidden, c)
        yield from norm_items(sizes, "mlm.norm", rows=sizes.predicted)
        yield Item("head.input", hidden, c)
    if model.sentence_order:
        yield Item("sentence.order.input", b * model.hidden, c)


def loss_working_bytes(sizes: Sizes, vocab_size: int) -> int:
    """What loss and output head need beside what they keep: some rows of the logits widened, or
    what the head's backward makes. The gradient takes the place of the logits; of a soft cap it is
    beside them."""
    c, wide, columns = sizes.compute_bytes, sizes.wide_bytes, sizes.share(vocab_size)
    if sizes.model.classifies:
        return sizes.predicted * sizes.model.classes * 2 * wide
    logits, half = sizes.predicted * columns, c < wide
    if sizes.software.attention != "flash":
        return logits * (wide + c) * half
    uncapped = c * logits if sizes.model.logit_softcap else 0
    head = linear_backward(sizes, sizes.model.hidden, columns, "head", rows=sizes.predicted)
    return uncapped + max(half * wide * min(logits, DEVICE_ELEMENTS), head)
