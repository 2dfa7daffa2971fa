"""What fills memory, and changes that fit: each of them is legal, and fits by the same account."""

import itertools
from dataclasses import replace

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
    assert first == "parallel.zero = 1"  # nothing more is sent, nor computed
    text = relief.explain(step(config), 0.5 * needed)
    assert text.count("\n  ") == 5 + 3 and "pipeline rank 0" in text
    assert text.splitlines()[-4] == "each of these changes would be enough:"
    assert "no layout" in relief.explain(step(config), 1)


def test_partitioned_activations_are_offered_and_give_way_to_sequence_parallelism():
    sizes = {"parallel.tensor": 2, "recompute.mode": "full", "model.layers": 40}
    config = shaped(2, **sizes)
    needed = step(config).largest()[1].total
    offered = dict(relief.changes(step(config), 0.99 * needed))
    text = "recompute.partition_activations = true"
    partitioned = shaped(2, **sizes, **{"recompute.partition_activations": True})
    assert offered[text].total == step(partitioned).largest()[1].total
    needed = step(partitioned).largest()[1].total
    found = [text for text, _ in relief.changes(step(partitioned), 0.9 * needed)]
    both = "parallel.sequence_parallel = true, recompute.partition_activations = false"
    assert any(text.startswith(both) for text in found)


def test_sharding_and_offload_are_advised_where_they_help():
    """By real keys of a configuration: to the least that fits, and what a run may not do left
    out."""
    config = shaped(**{"model.hidden": 512, "model.seq_length": 16, "batch.micro_size": 1})
    memory = MemoryModel.of(config, VOCAB, on_host=False)
    plain = relief.Step(memory, config.layout, 16)
    least = plain.largest()[1]
    found = [text for text, _ in itertools.islice(relief.changes(plain, 0.75 * least.total), 20)]
    assert found[0] == "parallel.zero = 1"
    found = [text for text, _ in itertools.islice(relief.changes(plain, 0.6 * least.total), 20)]
    assert "parallel.zero = 2" in found and 'parallel.offload = "optimizer"' in found
    bound = [
        text
        for text, _ in itertools.islice(
            relief.changes(replace(plain, most_zero=1), 0.6 * least.total), 20
        )
    ]
    assert not any("zero = 2" in text or "zero = 3" in text for text in bound)
    grouped = replace(plain, layout=replace(config.layout, zero=3, shard_group=2))
    needed = grouped.largest()[1].total
    assert next(relief.changes(grouped, 0.8 * needed))[0] == 'parallel.shard_group = "all"'


def test_a_reproducible_run_is_not_told_of_zero_2():
    for reproducible, most in ((False, 3), (True, 1)):
        config = shaped(**{"run.reproducible": reproducible})
        assert relief.Step.of(config, VOCAB).most_zero == most


def test_sizes_read_well():
    assert [relief.size(n) for n in (512, 2048, 3 << 20, 5 << 30)] == [
        "512 bytes",
        "2.0 KiB",
        "3.0 MiB",
        "5.0 GiB",
    ]


def test_nothing_is_advised_that_the_method_refuses():
    config = shaped(**{"model.hidden": 512, "data_parallel.method": "local"})
    found = relief.Step.of(config, VOCAB, on_host=False)
    needed = 0.6 * found.largest()[1].total
    keys = [text for text, _ in itertools.islice(relief.changes(found, needed), 20)]
    assert keys and not any("parallel.zero" in key or "offload" in key for key in keys)
