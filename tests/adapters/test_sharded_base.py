"""Frozen weights under ZeRO 3: each data rank keeps a part of them, and gathers the others where
they are used. Nothing else of a training is another: its bits, what it saves, what it goes on
from."""

import math
import shutil

import pytest
import torch

from ptdmpi.comm.world import World
from ptdmpi.train.tasks.measured import live_model
from tests import _stored
from tests._configs import layout
from tests._engines import assert_same_bits, build, logical, steps_of, train
from tests._runs import VOCAB_SIZE, loop, records, tensors
from tests.parallel import parallel

LORA = {"adapt.method": "lora", "adapt.rank": 3, "adapt.dropout": 0.1}
ZERO, FULL = {"parallel.zero": 3}, {"recompute.mode": "full"}
UNTIED = {"model.tie_embeddings": False}
DIVIDED = {"parallel.sequence_parallel": True}
# one microbatch on each data rank: of several ZeRO 2 and 3 sum the gradients in another order
ALONE = {
    2: [layout(d=2) | {"batch.global_size": 4}, layout(d=2) | FULL | UNTIED],
    4: [
        layout(t=2, d=2) | DIVIDED | FULL | {"batch.global_size": 4},
        layout(d=4) | {"parallel.shard_group": 2, "model.kind": "llama"} | UNTIED,
    ],
}
PIPELINED = layout(p=2, v=2, d=2) | {"model.layers": 4}


@pytest.mark.cases(1)
@parallel(ranks=[2, 4])
@pytest.mark.parametrize("precision", [pytest.param("fp32", marks=pytest.mark.long), "bf16"])
def test_the_bits_are_those_of_a_base_that_is_whole(comm, precision):
    for chosen in ALONE[comm.size]:
        given = {"precision.compute": precision, "batch.micro_size": 4} | LORA | chosen
        given["batch.micro_size"] = given.get("batch.global_size", 8) // given["parallel.data"]
        whole = {k: v for k, v in given.items() if k != "parallel.shard_group"}
        if "parallel.shard_group" in given:  # whose sums are taken group by group
            whole = given | {"parallel.zero": 2}
        assert_same_bits(train(comm, given | ZERO, steps=2), train(comm, whole, steps=2))


@parallel(ranks=[4])
@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=pytest.mark.long)])
def test_the_bits_of_chunks_are_those_under_zero_2(comm, precision):
    """Which leaves weights whole, and sums microbatches one by one as well."""
    given = {"precision.compute": precision} | LORA | PIPELINED
    found, expected = (train(comm, given | {"parallel.zero": z}, steps=2) for z in (3, 2))
    assert_same_bits(found, expected)


@parallel(ranks=[2])
def test_a_rank_keeps_its_part_and_lets_go_of_the_others(comm):
    engine = build(World(comm), layout(d=2) | LORA | ZERO | FULL)
    buffer, whole = engine.buffer, logical(engine, engine.state.frozen())
    alone = build(World(comm), layout(d=2) | LORA)
    every, units = len(alone.buffer.idle_weights), len(buffer.frozen_units)
    assert units == 6 and every <= 2 * len(buffer.idle_weights) < every + units * 512
    expected = logical(alone, alone.state.frozen())
    assert whole.keys() == expected.keys()
    assert all(torch.equal(whole[name], one) for name, one in expected.items())
    before = buffer.idle_weights.clone()
    steps_of(engine, 1)
    assert torch.equal(before, buffer.idle_weights)
    (stage,) = engine.stages.values()
    # a step is over: they are gathered anew for the next one
    frozen = [one for _, one in stage.named_logical_parameters() if one.entry.name in whole]
    assert frozen and all(torch.isnan(one).all() for one in frozen)
    model = live_model(engine)
    found = model.log_probabilities(torch.zeros(4, 1, dtype=torch.long), torch.ones(4, 1).long())
    assert torch.isfinite(found[0]).all()


@parallel(ranks=[2])
def test_over_a_base_from_files_and_resumed_on_another_number_of_shards(comm, tmp_path):
    """Half of the run in shards and half without has the losses of one that never has any."""
    if comm.rank == 0:
        _stored.stored(tmp_path / "base", VOCAB_SIZE, layers=4)
    comm.Barrier()
    given = LORA | layout(d=2) | {"adapt.base": str(tmp_path / "base"), "run.steps": 4}
    given |= {"checkpoint.every_steps": 2, "checkpoint.keep": 0, "batch.global_size": 2}
    runs = {name: tmp_path / name for name in ("whole", "shards")}
    for name, more in (("whole", {}), ("shards", ZERO | FULL)):
        with loop(comm, tmp_path, given | more | {"run.dir": str(runs[name])}) as made:
            made.run()
    comm.Barrier()
    if comm.rank == 0:  # as after a cut of the power behind the second step
        shutil.rmtree(runs["shards"] / "checkpoints/step-00000004")
        (runs["shards"] / "checkpoints/latest").unlink()
        (runs["shards"] / "done").unlink(missing_ok=True)
    comm.Barrier()
    with loop(comm, tmp_path, given | {"run.dir": str(runs["shards"])}) as made:
        made.run()
    comm.Barrier()
    losses = {
        name: [(one["loss"], one["grad_norm"]) for one in records(run) if "loss" in one]
        for name, run in runs.items()
    }
    assert losses["shards"] == losses["whole"] and math.isfinite(losses["whole"][-1][0])
    found, expected = (tensors(run / "checkpoints/step-00000004") for run in runs.values())
    assert all((found[name] == one).all() for name, one in expected.items())
    assert found and not any("embedding" in name for name in found)
