"""The method `compressed`: every rule of feedback is what n simulated workers in numpy do, nothing
is lost at ratio 1, no layout changes a bit, and no overflow stays in a memory."""

import itertools
import math

import pytest
import torch

from ptdmpi.checkpoint.save import Checkpoints
from ptdmpi.comm.world import World
from ptdmpi.config import InputError
from ptdmpi.engine.compress.line import Coder
from ptdmpi.model.random import fold
from ptdmpi.plan.shape.codes import bits_per_element
from tests._configs import layout, small
from tests._engines import (
    assert_same_bits,
    build,
    course,
    greatest_difference,
    logical,
    microbatches,
    steps_of,
    train,
    whole_gradients,
)
from tests.engine.compress import _reference
from tests.engine.compress._given import fill, units_of
from tests.parallel import parallel

FEEDBACK = ("none", "mem_sgd", "double_squeeze", "ef21", "neolithic")
COMPRESSORS = {
    "top_k": {"ratio": 0.05},
    "random_k": {"ratio": 0.05},
    "sign": {},
    "qsgd": {"levels": 3},
    "int8": {"block": 100},
    "int4": {"block": 32},
    "power_sgd": {"rank": 2},
}
LONGEST = {"top_k": 4096, "random_k": 4096, "sign": 512, "qsgd": 512, "int8": 100, "int4": 32}
LONG = pytest.mark.long
DOUBLE = {"precision.compute": "fp64"}


def method(compressor: str, feedback: str, **more):
    options = COMPRESSORS[compressor] | more
    changes = {"method": "compressed", "compressor": compressor, "error_feedback": feedback}
    return {f"data_parallel.{key}": value for key, value in {**changes, **options}.items()}


def reduced(engine, number: int) -> None:
    """One step's reduction of such gradients, as if updated with."""
    fill(engine, number)
    engine.policy.reduce()
    engine.state.counters.updates += 1


CASES = [
    *itertools.product(["top_k", "qsgd"], FEEDBACK),
    *itertools.product(["random_k", "sign", "int8", "int4"], ["none", "mem_sgd"]),
]


def quick(cases, *few):
    """All cases, those that are not among a `few` marked long."""
    return [case if case in few else pytest.param(*case, marks=pytest.mark.long) for case in cases]


# each compressor, and each feedback, in some case
EACH = [("top_k", "double_squeeze"), ("qsgd", "mem_sgd"), ("random_k", "neolithic")]
EACH += [("sign", "none"), ("int8", "ef21"), ("int4", "mem_sgd")]


@pytest.mark.cases(1)
@parallel(ranks=[4])
@pytest.mark.parametrize(
    "compressor, feedback",
    quick(CASES, ("top_k", "ef21"), ("qsgd", "mem_sgd")),
)
@pytest.mark.parametrize("data", [4, pytest.param(3, marks=pytest.mark.long)])
def test_as_simulated_workers_in_numpy(comm, compressor, feedback, data):
    world = World(comm).first(data)
    if world is None:
        return
    options = {"rounds": 3} if feedback == "neolithic" else {}
    changes = layout(d=data) | DOUBLE | method(compressor, feedback, **options)
    changes |= {"model.layers": 1, "batch.global_size": 12, "batch.micro_size": 1}
    engine = build(world, changes)
    size, units = engine.buffer.size, units_of(engine)
    longest = LONGEST[compressor]
    assert max(len(places) for _, places in units) == min(longest, 8 * 32 * 4)
    options |= COMPRESSORS[compressor]
    workers = _reference.Workers(feedback, compressor, options, units, data, size)
    for number in range(3):
        fill(engine, number)
        gradients = engine.axes["data"].all_gather(engine.buffer.gradients[:size]).view(data, -1)
        key = fold(engine.config.run.seed, 1_000_003, engine.state.counters.updates)
        expected = workers.step(data * gradients.numpy(), key)
        reduced(engine, number)
        found = engine.buffer.gradients[:size].numpy()
        scale = abs(expected).max()
        assert abs(found - expected).max() <= 1e-10 * scale


@pytest.mark.long
@parallel(ranks=[4])
@pytest.mark.parametrize(
    "compressor, feedback",
    quick(
        [*zip(["top_k", "random_k"] * 3, FEEDBACK, strict=False)],
        ("top_k", "double_squeeze"),
    ),
)
def test_ratio_one_is_the_sum_of_all(comm, compressor, feedback):
    where = layout(p=2, d=2) | DOUBLE
    plain = train(comm, where, steps=3)
    found = train(comm, where | method(compressor, feedback, ratio=1.0), steps=3)
    assert greatest_difference(found.losses, plain.losses) <= 1e-12
    assert greatest_difference(found.norms, plain.norms) <= 1e-12
    for name, values in found.parameters.items():
        torch.testing.assert_close(values, plain.parameters[name], rtol=1e-12, atol=1e-12)


@pytest.mark.long
@parallel(ranks=[4])
@pytest.mark.parametrize("compressor, feedback", quick(EACH, ("qsgd", "mem_sgd")))
def test_no_pipeline_changes_a_bit(comm, compressor, feedback):
    """Nor do chunks or another schedule; tied table and all."""
    told = method(compressor, feedback)
    plain = train(comm, layout(d=2) | told, steps=3)
    one_bit = train(comm, layout(p=2, d=2) | told | {"parallel.schedule": "gpipe"}, steps=3)
    assert_same_bits(one_bit, train(comm, layout(p=2, d=2) | told, steps=3))
    # a tied table on two ranks is summed over both first: as without compression
    assert greatest_difference(one_bit.losses, plain.losses) <= 1e-6


@pytest.mark.long
@parallel(ranks=[4])
@pytest.mark.parametrize(
    "compressor, feedback",
    quick(
        [*EACH, ("power_sgd", "mem_sgd"), ("power_sgd", "ef21")],
        ("power_sgd", "mem_sgd"),
    ),
)
def test_of_equal_gradients_the_same_bits_in_every_layout(comm, compressor, feedback):
    """Three steps of what a method makes of given gradients, and what it remembers: t, p and v."""
    told = method(compressor, feedback) | {"model.layers": 4, "model.kv_heads": 2}
    told |= {"model.tie_embeddings": False}
    found = []
    for where in (layout(d=2), layout(t=2, d=2), layout(p=2, d=2), layout(p=2, v=2, d=2)):
        world = World(comm).first(
            math.prod(where[f"parallel.{a}"] for a in ("tensor", "pipeline", "data"))
        )
        if world is None:
            continue
        engine = build(world, told | where)
        for number in range(3):
            reduced(engine, number)
        kept = {
            kind: logical(
                engine,
                (piece for piece in engine.state.pieces() if piece.kind == kind
                 and piece.replica in (None, 0)),
            )
            for kind in engine.policy.kinds
        }  # fmt: skip
        found.append({"gradients": whole_gradients(engine)} | kept)
    for other in found[1:]:
        for kind, tensors in found[0].items():
            for name, values in tensors.items():
                if compressor == "power_sgd":  # products of matrices: as a library sums them
                    torch.testing.assert_close(other[kind][name], values, rtol=1e-4, atol=1e-5)
                else:
                    assert torch.equal(other[kind][name], values), (kind, name)


@parallel(ranks=[4])
@pytest.mark.parametrize(
    "feedback", [*FEEDBACK[2:4], *(pytest.param(f, marks=LONG) for f in ("none", *FEEDBACK[1::3]))]
)
def test_an_overflow_is_not_remembered(comm, feedback):
    engine = build(World(comm), layout(p=2, d=2) | method("top_k", feedback))
    steps_of(engine, 1)
    before = [part.clone() for part in engine.state.flats]
    data = engine.axes["data"].rank
    if comm.rank == 1:  # of one stage of one replica
        weight = engine.state.view("weights", "layers.0.mlp.up.weight")
        kept = weight.clone()
        weight[0] = math.inf
        engine.buffer.refresh_weights()
    assert engine.step(1, microbatches(engine.config, 1, data)).skipped
    if comm.rank == 1:
        weight.copy_(kept)
        engine.buffer.refresh_weights()
    assert all(map(torch.equal, engine.state.flats, before))
    assert not engine.step(1, microbatches(engine.config, 1, data)).skipped


@parallel(ranks=[4])
@pytest.mark.parametrize(
    "compressor, feedback",
    quick(
        [*itertools.product(["top_k", "int4"], FEEDBACK)],
        ("top_k", "mem_sgd"),
        ("int4", "neolithic"),
    ),
)
def test_the_bytes_that_travel_are_those_of_the_codes(comm, compressor, feedback):
    engine = build(World(comm), layout(d=comm.size) | method(compressor, feedback))
    policy, group = engine.policy, engine.axes["data"]
    rounds = 2 if feedback == "neolithic" else 1
    key, used = fold(engine.config.run.seed, 1_000_003, 0), policy.compression
    coders = [Coder(used.compressor, batch, key, rounds) for batch in used.batches]
    before = group.tally.copy()
    reduced(engine, 0)
    sent = group.tally.since(before)
    if feedback in ("double_squeeze", "neolithic"):
        parts = [
            [coder.share(rank, comm.size).code_bytes(torch.float32) for rank in range(comm.size)]
            for coder in coders
        ]
        others = sum(sum(part) - part[comm.rank] for part in parts)
        assert sent.whole_bytes["send"] == others
        assert sent.whole_bytes["all_gather"] == sum(comm.size * max(part) for part in parts)
    else:
        codes = sum(coder.code_bytes(torch.float32) for coder in coders)
        assert sent.whole_bytes["all_gather"] == comm.size * codes
        assert sum(sent.whole_bytes.values()) == comm.size * codes
    codes = sum(coder.code_bytes(torch.float32) for coder in coders)
    elements = sum(batch.tiles * batch.width for batch in used.batches)
    assert policy.bits_per_element == 8 * codes / elements
    large = bits_per_element(engine.config.data_parallel, 32, (1, 1)) * rounds
    assert policy.bits_per_element == pytest.approx(large, rel=0.1)  # units are short here


@parallel(ranks=[4], limit_s=90)
@pytest.mark.parametrize(
    "compressor, feedback",
    quick(
        [
            ("qsgd", "neolithic"),
            ("qsgd", "double_squeeze"),
            ("top_k", "ef21"),
            ("power_sgd", "mem_sgd"),
        ],
        ("qsgd", "neolithic"),
    ),
)
def test_a_resumed_run_has_the_same_bits(comm, tmp_path, compressor, feedback):
    """What is remembered, and what is drawn, goes on where it was."""
    changes = layout(p=2, d=2) | method(compressor, feedback) | {"model.layers": 2}

    def steps(engine, first: int, last: int):
        rank = engine.axes["data"].rank
        results = [engine.step(k, microbatches(engine.config, k, rank)) for k in range(first, last)]
        return [(one.loss, one.grad_norm) for one in results]

    straight = build(World(comm), changes)
    steps(straight, 0, 3)
    saves = Checkpoints(tmp_path, straight.state, straight.axes, course(straight.config))
    saves.save(3)
    expected = steps(straight, 3, 5)
    resumed = build(World(comm), changes)
    loads = Checkpoints(tmp_path, resumed.state, resumed.axes, course(resumed.config))
    assert loads.resume("auto")[0].step == 3
    assert steps(resumed, 3, 5) == expected
    for kind, found in resumed.state.kinds.items():
        for name in found.held:
            assert torch.equal(resumed.state.view(kind, name), straight.state.view(kind, name))


@parallel(ranks=[4])
def test_a_lost_replica_leaves_no_part_of_what_all_have_estimated(comm):
    """EF21: the mean of the estimates is that of those that are left."""
    told = method("top_k", "ef21") | {"batch.micro_size": 1}
    engine = build(World(comm), layout(d=4) | told)
    steps_of(engine, 2)
    assert engine.policy.settled
    fewer = World(comm).first(2)
    if fewer is not None:
        left = build(fewer, layout(d=2) | told)
        for flat, held in zip(left.state.flats, engine.state.flats, strict=True):
            flat.copy_(held)
        mean = left.state.kinds["estimate_mean"].parts[0]
        before = mean.clone()
        left.policy.replicas_lost()
        own = left.axes["data"].all_gather(left.state.kinds["estimate"].parts[0]).view(2, -1)
        assert torch.equal(mean, (own[0] + own[1]) / 2) and not torch.equal(mean, before)


@pytest.mark.parametrize("feedback", ["double_squeeze", "neolithic"])
def test_a_low_rank_is_not_squeezed_twice(feedback):
    with pytest.raises(InputError, match="already has low rank"):
        small(method("power_sgd", feedback))
