"""A value that is not finite: the first rank, layer and tensor are named, the step changes nothing,
and after too many in a row the run stops."""

import math

import pytest
import torch

from ptdmpi.comm.world import World
from ptdmpi.model.stage import TIED_NAME
from ptdmpi.train.nonfinite import Skips, examine
from tests._configs import layout
from tests._engines import build, microbatches, steps_of
from tests._runs import log, loop, records
from tests.parallel import parallel

GRID = layout(t=2, p=2, v=2, d=1) | {"model.layers": 4, "batch.micro_size": 1}
REPLICAS = layout(p=2, d=2) | {"model.layers": 4, "batch.micro_size": 1}


def broken(comm, changes, where) -> tuple:
    """An engine that was broken by `where(engine)`, and what is found in its second step."""
    engine = build(World(comm), changes)
    steps_of(engine, 1)
    where(engine)
    batches = microbatches(engine.config, 1, engine.axes["data"].rank)
    before = engine.buffer.masters[0].clone()
    updates = engine.state.counters.updates
    result = engine.step(1, batches)
    finding = examine(engine, 1, batches)
    assert result.skipped and not result.overflow
    assert engine.state.counters.updates == updates
    assert torch.equal(engine.buffer.masters[0].nan_to_num(), before.nan_to_num())
    return engine, finding


def poison_gradient(engine, name: str, number: int) -> None:
    """Every backward of microbatch `number` leaves an infinite gradient of `name` here."""
    for stage in engine.stages.values():
        named = dict(stage.named_logical_parameters())
        if name in named:
            usual = stage.backward_microbatch

            def backward(microbatch, dy, usual=usual, weight=named[name]):
                result = usual(microbatch, dy)
                if microbatch.number == number:
                    weight.main_grad.view(-1)[0] = math.inf
                return result

            stage.backward_microbatch = backward


@parallel(ranks=[4])
def test_a_weight_is_named_on_the_rank_that_holds_it(comm):
    """With t=2, v=2: ranks 2 and 3 hold layers 1 and 3; rank 3's part of one tensor is broken."""

    def where(engine):
        if comm.rank == 3:
            weight = dict(engine.stages[3].named_logical_parameters())["layers.3.mlp.up.weight"]
            weight.data.view(-1)[5] = math.nan

    engine, finding = broken(comm, GRID, where)
    assert (finding.rank, finding.what) == (3, "weight layers.3.mlp.up.weight")
    said: list[str] = []
    batches = microbatches(engine.config, 1, 0)
    result = engine.step(1, batches)
    with pytest.raises(SystemExit) as stopped:
        Skips(engine, str, 3, said.append).after(1, result, batches)
    assert stopped.value.code == 1 and "a weight is not finite" in said[1]


@parallel(ranks=[2])
def test_a_frozen_weight_is_named_beneath_adapters(comm):
    """It was so when it was loaded: nothing but another base mends it."""

    def where(engine):
        name = "layers.1.mlp.up.weight"
        (held,) = [part for part in engine.buffer.own_frozen() if part.entry.name == name]
        held.view(engine.buffer.idle_parts)[5 * comm.rank] = math.inf

    lora = {"adapt.method": "lora", "adapt.rank": 3, "adapt.alpha": 6.0}
    engine, finding = broken(comm, layout(d=2) | lora, where)
    assert (finding.rank, finding.what) == (0, "frozen weight layers.1.mlp.up.weight")
    said: list[str] = []
    batches = microbatches(engine.config, 1, comm.rank)
    result = engine.step(1, batches)
    with pytest.raises(SystemExit):
        Skips(engine, str, 3, said.append).after(1, result, batches)
    assert "adapt.base has a weight that is not finite" in said[1]


@parallel(ranks=[4])
def test_the_first_output_is_named_with_its_microbatch(comm):
    """Layer 1 gives infinity for microbatch 5, which breaks all later outputs and all gradients."""

    def where(engine):
        def spoil(module, inputs, output):
            if engine.place.doing.op == "F1.5":
                return output * math.inf
            return None

        if comm.rank in (2, 3):
            engine.stages[1].layers["1"].mlp.down.register_forward_hook(spoil)

    _, finding = broken(comm, GRID, where)
    assert finding.what == "output of layers.1.mlp.down"
    assert (finding.rank, finding.microbatch, finding.samples) == (2, 5, (13,))


@parallel(ranks=[4])
@pytest.mark.parametrize("reproducible", [False, True])
def test_the_last_gradient_is_named(comm, reproducible):
    """p=2, d=2: rank 3 is the second replica of the last stage; its sum reaches rank 2 as well."""
    name = "layers.2.attention.out.weight"

    def where(engine):
        if comm.rank == 3:
            poison_gradient(engine, name, 1)

    _, finding = broken(comm, REPLICAS | {"run.reproducible": reproducible}, where)
    assert (finding.rank, finding.what) == (3, f"gradient of {name}")
    assert (finding.microbatch, finding.samples) == (5, (13,))


@parallel(ranks=[2])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_whatever_is_sharded_the_same_is_named(comm, zero):
    is_named_alike(comm, zero)


@parallel(ranks=[4])
@pytest.mark.parametrize("zero", [2, *(pytest.param(z, marks=pytest.mark.long) for z in (0, 1, 3))])
def test_whatever_is_sharded_in_groups_the_same_is_named(comm, zero):
    is_named_alike(comm, zero)


def is_named_alike(comm, zero: int) -> None:
    """The last rank's value is broken, with one group of two ranks and with two.

    It is named even if another rank sums it, or gathers it.
    """
    changes = layout(d=comm.size) | {"parallel.zero": zero, "model.layers": 2}
    changes |= {"parallel.shard_group": 2} if zero else {}
    engine = build(World(comm), changes | {"batch.micro_size": 4 // comm.size})
    steps_of(engine, 1)
    last, (stage,) = comm.size - 1, engine.stages.values()
    layer, mine = stage.layers["1"], comm.rank == last
    weights = dict(stage.named_logical_parameters())

    def named() -> tuple[int, str, int]:
        batches = microbatches(engine.config, 1, engine.axes["data"].rank)
        before = [part.clone() for part in engine.state.flats]
        assert engine.step(1, batches).skipped
        same = zip(engine.state.flats, before, strict=True)
        assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in same)
        finding = examine(engine, 1, batches)
        return finding.rank, finding.what, finding.microbatch

    def here(op: str) -> bool:
        return mine and engine.place.doing.op == op

    def spoiled(module, inputs, output):
        return output * math.inf if here("F0.1") else None

    hook = layer.mlp.up.register_forward_hook(spoiled)
    assert named() == (last, "output of layers.1.mlp.up", 2 * last + 1)
    hook.remove()

    forward = stage.forward_microbatch

    def lost(microbatch, x):
        forward(microbatch, x)
        if here("F0.1"):
            microbatch.total = microbatch.total * math.nan

    stage.forward_microbatch = lost
    assert named() == (last, "loss", 2 * last + 1)
    stage.forward_microbatch = forward

    for name in ("layers.1.attention.qkv.weight", TIED_NAME):
        weight = weights[name]
        accumulate = weight.accumulate

        def overflows(add, weight=weight, accumulate=accumulate, **named):
            accumulate(add, **named)
            if here("B0.1"):
                weight.main_grad.view(-1)[0] = math.inf

        weight.accumulate = overflows
        assert named() == (last, f"gradient of {name}", 2 * last + 1)
        weight.accumulate = accumulate

    down = weights["layers.1.mlp.down.weight"]
    if mine:
        engine.buffer.own_part(down.entry).view(engine.buffer.masters)[0] = math.nan
    assert named() == (last, "weight layers.1.mlp.down.weight", -1)


@parallel(ranks=[2])
def test_a_passing_fault_is_told_from_a_lasting_one(comm):
    engine = build(World(comm), layout(p=2))
    said: list[str] = []
    skips = Skips(engine, str, 1, said.append)
    batches = microbatches(engine.config, 0, 0)
    norm = engine.reduction.global_norm
    engine.reduction.global_norm = lambda: norm() * math.nan
    result = engine.step(0, batches)
    skips.after(0, result, batches)
    assert "finite when computed again" in said[0] and "samples 0 to 7" in said[0]
    with pytest.raises(SystemExit) as stopped:
        skips.after(1, result, batches)
    assert stopped.value.code == 1
    skips.in_a_row = 1
    engine.reduction.global_norm = norm
    skips.after(2, engine.step(2, batches), batches)
    assert skips.in_a_row == 0


@parallel(ranks=[1])
def test_an_overflow_of_fp16_counts_only_at_the_smallest_scale(comm):
    engine = build(World(comm), layout() | {"precision.compute": "fp16"})
    engine.state.counters.loss_scale = 2.0
    norm = engine.reduction.global_norm
    engine.reduction.global_norm = lambda: norm() * math.inf
    results = steps_of(engine, 2)
    assert [result.loss_scale for result in results] == [2.0, 1.0]
    assert [(result.skipped, result.overflow) for result in results] == [
        (True, True),
        (True, False),
    ]


@parallel(ranks=[2])
def test_a_run_skips_and_stops_with_the_samples_in_its_log(comm, tmp_path):
    """Steps 2, 4, 5 and 6 are broken: one in a row is borne, three are not."""

    def patch(made):
        if comm.rank == 1:
            name = "layers.3.mlp.up.weight"
            step = made.engine.step

            def breaking(number, batches):
                for stage in made.engine.stages.values():
                    stage.__dict__.pop("backward_microbatch", None)
                if number in (1, 3, 4, 5):
                    poison_gradient(made.engine, name, 2)
                return step(number, batches)

            made.engine.step = breaking

    changes = {"parallel.pipeline": 2, "run.steps": 9, "run.max_skips": 2}
    with loop(comm, tmp_path, changes, patch) as made:
        with pytest.raises(SystemExit) as stopped:
            made.run()
        host = made.world.host
    assert stopped.value.code == 1
    if comm.rank == 0:
        where = f"gradient of layers.3.mlp.up.weight on rank 1 ({host}) is not finite, microbatch 2"
        skipped = [line for line in log(tmp_path / "run").splitlines() if where in line]
        assert [line.split("(")[1].split(" ")[0] for line in skipped] == ["1", "1", "2", "3"]
        assert [line.rsplit(" ", 1)[1] for line in skipped] == ["10", "26", "34", "42"]
        kept = records(tmp_path / "run")
        assert [record["skipped"] for record in kept] == [False, True, False, True, True, True]
        assert "more than run.max_skips = 2" in log(tmp_path / "run")
        assert not (tmp_path / "run/done").exists()
