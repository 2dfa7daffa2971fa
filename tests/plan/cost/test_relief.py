"""What fills memory, and changes that fit: each of them is legal, and fits by the same account."""

import itertools

import pytest

from ptdmpi.plan.cost import relief
from ptdmpi.plan.cost.memory import MemoryModel
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


def step(config):
    memory = MemoryModel.of(config, VOCAB)
    return relief.Step(memory, config.layout, config.batch.global_size)


@pytest.mark.parametrize("share", [0.9, 0.5, 0.2])
def test_three_changes_fit_as_they_say(share):
    config = shaped()
    needed = step(config).largest()[1].total
    found = list(itertools.islice(relief.changes(step(config), share * needed), 3))
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
        assert step(tried).largest()[1].total == after.total <= share * needed
    assert len({text for text, _ in found}) == 3


def test_few_and_cheap_changes_come_first():
    config = shaped()
    needed = step(config).largest()[1].total
    first, _ = next(relief.changes(step(config), 0.95 * needed))
    assert first == "batch.micro_size = 2" or first.startswith("recompute.mode")
    text = relief.explain(step(config), 0.5 * needed)
    assert text.count("\n  ") == 5 + 3 and "pipeline rank 0" in text
    assert text.splitlines()[-4] == "what would fit, by itself:"
    assert "no layout" in relief.explain(step(config), 1)


def test_sizes_read_well():
    assert [relief.size(n) for n in (512, 2048, 3 << 20, 5 << 30)] == [
        "512 bytes",
        "2.0 KiB",
        "3.0 MiB",
        "5.0 GiB",
    ]
