"""What fills memory, and changes that fit: each of them is legal, and fits by the same account."""

import itertools

import pytest

from ptdmpi.plan.cost import memory, relief
from ptdmpi.plan.cost.state import state_bytes
from tests._configs import small

VOCAB = 5000


def shaped(ranks=4, **changes):
    sizes = {
        "model.layers": 4,
        "model.hidden": 64,
        "model.seq_length": 128,
        "batch.global_size": 16,
        "batch.micro_size": 4,
    }
    return small({**sizes, **changes}, ranks)


def test_the_parts_are_those_of_the_inventory():
    config = shaped(**{"parallel.pipeline": 2})
    for rank in (0, 1):
        found, sizes = relief.need(config, VOCAB, rank), memory.Sizes(config)
        state = memory.total_bytes(state_bytes(sizes, VOCAB, rank))
        activations = memory.peak_activation_bytes(sizes, VOCAB, rank)
        assert found.total == state + activations
        assert found.parts["activations"] == activations
        assert found.parts["optimizer"] == 2 * found.parts["weights"]
    assert relief.largest(config, VOCAB).total == max(
        relief.need(config, VOCAB, rank).total for rank in (0, 1)
    )


@pytest.mark.parametrize("share", [0.9, 0.5, 0.2])
def test_three_changes_fit_as_they_say(share):
    config = shaped()
    needed = relief.largest(config, VOCAB).total
    found = list(itertools.islice(relief.changes(config, VOCAB, share * needed), 3))
    assert len(found) == 3
    for text, after in found:
        ranks, changes = 4, {}
        for part in text.split(", "):
            key, equals, value = part.partition(" = ")
            if not equals:
                ranks = int(part.removesuffix(" ranks"))
                continue
            changes[key] = int(value) if value.isdigit() else value.strip('"')
        tried = shaped(ranks, **changes)
        assert relief.largest(tried, VOCAB).total == after.total <= share * needed
    assert len({text for text, _ in found}) == 3


def test_few_and_cheap_changes_come_first():
    config = shaped()
    needed = relief.largest(config, VOCAB).total
    first, _ = next(relief.changes(config, VOCAB, 0.95 * needed))
    assert first == "batch.micro_size = 2" or first.startswith("recompute.mode")
    text = relief.explain(config, VOCAB, 0.5 * needed)
    assert text.count("\n  ") == 4 + 3 and "pipeline rank 0" in text
    assert text.splitlines()[-4] == "what would fit, by itself:"
    assert "no layout" in relief.explain(config, VOCAB, 1)


def test_sizes_read_well():
    assert [relief.size(n) for n in (512, 2048, 3 << 20, 5 << 30)] == [
        "512 bytes",
        "2.0 KiB",
        "3.0 MiB",
        "5.0 GiB",
    ]
