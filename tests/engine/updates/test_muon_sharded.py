"""Muon where data ranks share out its state: the bits of unsharded, and the work divided."""

from collections import Counter
from unittest.mock import patch

import pytest
import torch

from benchmarks.planning.allocated import measured
from ptdmpi.checkpoint import examine
from ptdmpi.checkpoint.save import Checkpoints
from ptdmpi.comm.world import World
from ptdmpi.config import Layout
from ptdmpi.config.zero import Sharing
from ptdmpi.engine import muon
from ptdmpi.engine.engine import Engine
from ptdmpi.plan.cost.methods import MethodTimes
from ptdmpi.plan.cost.price import Pricer
from ptdmpi.plan.cost.stage_memory import Cut
from ptdmpi.plan.layout.run_method import RunMethod
from ptdmpi.plan.machine.cluster import load_cluster, load_model
from tests._configs import layout
from tests._engines import (
    assert_same_bits,
    build,
    course,
    foreseen_by,
    microbatches,
    steps_of,
    train,
)
from tests.parallel import parallel

LONG = pytest.mark.long
LLAMA = {"model.kind": "llama", "model.kv_heads": 2, "model.ffn_hidden": 44}
LORA = {"adapt.method": "lora", "adapt.rank": 9}
MUON = {"optimizer.kind": "muon", "optimizer.clip_norm": 0.5, "optimizer.ema_decay": 0.5}
ONE = {"batch.micro_size": 4}  # of 4 d samples one microbatch each
SHAPES = {
    "llama": LLAMA,
    "bf16": LLAMA | {"precision.compute": "bf16", "optimizer.nesterov": False},
    "untied": {"model.tie_embeddings": False, "optimizer.muon_scale": "original"},
    "groups": {
        "optimizer.groups": [{"names": ["layers.1.*"], "learning_rate_factor": 0.5}],
        "precision.compute": "fp64",
    },
    "lora": LORA | LLAMA,
}


@pytest.mark.cases(1)
@parallel(ranks=[2, pytest.param(3, marks=LONG)])
@pytest.mark.parametrize(
    "shape",
    [pytest.param(one, marks=LONG if one in ("untied", "groups") else []) for one in SHAPES],
)
def test_shards_have_the_bits_of_unsharded(comm, shape):
    where = layout(d=comm.size) | {"batch.global_size": 4 * comm.size}
    changes = MUON | ONE | where | SHAPES[shape]
    plain = train(comm, changes, steps=3)
    for zero in (1, 2, 3):
        assert_same_bits(train(comm, changes | {"parallel.zero": zero}, steps=3), plain)


@pytest.mark.cases(1)
@parallel(ranks=[4])
@pytest.mark.parametrize("group", ["all", 2])
def test_ranks_of_a_shard_group_divide_the_work(comm, group):
    """Each matrix is made orthogonal once in a group, and none of the ranks has most of them."""
    changes = MUON | LLAMA | layout(d=4) | {"parallel.shard_group": group, "batch.micro_size": 1}
    for zero in (1, 2, 3):
        engine, count = build(World(comm), changes | {"parallel.zero": zero}), Counter[str]()

        def orthogonal(matrix, kernels, count=count, real=muon.orthogonal):
            count["x".join(map(str, sorted(matrix.shape)))] += 1
            return real(matrix, kernels)

        with patch.object(muon, "orthogonal", orthogonal):
            steps_of(engine, 1)
        every = comm.allgather(count)
        size = engine.axes["shard"].size
        per_layer = {"32x32": 2, "16x32": 2, "32x44": 3}
        wanted = {shape: 3 * number * (4 // size) for shape, number in per_layer.items()}
        assert sum(every, Counter[str]()) == wanted
        most = max(one.total() for one in every)
        assert most <= {4: 10, 2: 15}[size], every


@parallel(ranks=[2])
def test_a_run_goes_on_in_another_layout(comm, tmp_path):
    """From shards: in the same layout with the same bits; what others read and write is equal."""
    world, changes = World(comm), MUON | LLAMA | {"run.steps": 4}

    def checkpoints(engine: Engine, path) -> Checkpoints:
        return Checkpoints(path, engine.state, engine.axes, course(engine.config))

    shared = changes | layout(d=2) | {"parallel.zero": 2}
    first = build(world, shared)
    steps_of(first, 2)
    checkpoints(first, tmp_path / "first").save(2)
    there = tmp_path / "first" / "step-00000002"
    again, other = build(world, shared), build(world, changes | layout(t=2))
    back = build(world, changes | layout(d=2) | {"parallel.zero": 1})
    for engine in (again, other):
        progress, _ = checkpoints(engine, tmp_path / "x").resume(str(there))
        assert progress.step == 2
    checkpoints(other, tmp_path / "second").save(2)
    checkpoints(back, tmp_path / "x").resume(str(tmp_path / "second" / there.name))
    checkpoints(back, tmp_path / "third").save(2)
    for path in ("second", "third"):
        differences = world.on_root(
            lambda path=path: [
                str(one) for one in examine.differences(there, tmp_path / path / there.name)
            ]
        )
        assert differences == []
    for step in (2, 3):
        batches = microbatches(first.config, step, comm.rank)
        assert first.step(step, batches).loss == again.step(step, batches).loss
    for one, two in zip(first.state.flats, again.state.flats, strict=True):
        assert torch.equal(one, two)


@pytest.mark.long
@parallel(ranks=[2])
@pytest.mark.parametrize(
    ("compute", "half"),
    [
        ("bf16", "native"),
        pytest.param("bf16", "widened", marks=LONG),
        pytest.param("fp64", "native", marks=LONG),
    ],
)
def test_memory_is_what_the_account_says(comm, compute, half):
    """State of the rank that has most, but for where parameters begin and end; and the most that
    the update of any rank needs while it runs."""
    hidden = 128 if compute == "fp64" else 512
    sizes = {"model.hidden": hidden, "batch.micro_size": 1}
    sizes |= {"precision.compute": compute, "batch.global_size": 2, "model.layers": 1}
    # under 1 one of the shards has a table of many positions, of which more is kept
    for zero, length in ((1, 256), (2, 4)):
        sizes |= {"parallel.zero": zero, "model.seq_length": length}
        engine = build(World(comm), MUON | layout(d=2) | sizes, half=half)
        steps_of(engine, 1)
        config = engine.config
        widens = engine.kernels.widens("cpu", torch.bfloat16)
        memory = foreseen_by(engine)
        foreseen = memory.peak(config.layout, 0, config.microbatches)
        kept = sum(part.nbytes for part in engine.state.flats)
        kept -= (compute != "bf16") * sum(part.nbytes for part in engine.buffer.masters)
        assert max(comm.allgather(kept)) == pytest.approx(foreseen.optimizer, rel=0.01)
        left, most = measured(lambda engine=engine: engine.optimizer._muon.step(1e-3))
        dealt = memory.stages.dealt(*held_by(config.layout))
        size = 8 if compute == "fp64" else 2
        rooms = [one.room_bytes(1, size, widens=widens) for one in dealt]
        assert left == 0 and most == pytest.approx(rooms[comm.rank], rel=0.03)
        assert max(rooms) <= foreseen.activations + foreseen.working
        comm.Barrier()


def held_by(where: Layout) -> tuple[Cut, int, int, Sharing]:
    """Whose part of the matrices is asked for."""
    return Cut.of(where), where.tensor, 0, where.sharing


def test_the_plan_knows_that_the_work_is_divided():
    """A layer's products take 1 / 8 of the time where 8 ranks of 24 layers share them out, and
    something more for what travels; no bound is above what is bounded."""
    cluster, model = load_cluster("dgx-h100"), load_model("gpt3-1.3b")
    times = MethodTimes(cluster, model, "bf16", RunMethod(moments=2, matrices=True))
    pricer = Pricer(times, 64)
    alone = times.matrices_s(Layout(1, 1, 8), [0])
    assert times.least_matrices_s(Layout(1, 1, 8), model.config.layers) == pytest.approx(alone)
    for zero in (1, 2, 3):
        where = Layout(1, 1, 8, zero=zero)
        shared = times.matrices_s(where, [0])
        assert alone / 8 < shared < alone / 6
        assert times.least_matrices_s(where, model.config.layers) == pytest.approx(alone / 8)
        assert pricer.rough_bound_s(where) <= pricer.bound_s(where)
