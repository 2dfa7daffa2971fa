"""Adapters from a later layer on: nothing runs a backward in front of the first of them, and what
is in front costs no gradient, activation, message or kernel of one."""

import itertools

import pytest

from benchmarks.planning.allocated import measured
from ptdmpi.comm.world import World
from ptdmpi.config import InputError, Layout
from ptdmpi.engine.engine import Engine
from ptdmpi.plan.cost.memory import MemoryModel
from ptdmpi.plan.cost.price import Pricer
from ptdmpi.plan.machine.cluster import Model, load_cluster
from ptdmpi.plan.shape import flops
from tests._configs import layout, small
from tests._engines import (
    HALVES,
    VOCAB_SIZE,
    assert_same_bits,
    build,
    foreseen_by,
    load,
    microbatches,
    passes,
    steps_of,
    train,
    whole_gradients,
    whole_weights,
)
from tests.adapters.test_engine import (
    EXACT,
    IA3,
    LLAMA,
    LORA,
    close,
    expected,
    merged,
    some_adapters,
)
from tests.parallel import parallel

LONG = pytest.mark.long
FIRST = {"adapt.first_layer": 1}
ZB = {"parallel.schedule": "zb-h1"}
DIVIDED = {"parallel.sequence_parallel": True}
CLASSES = {"task.kind": "classification", "task.labels": ["no", "maybe", "yes"]}
# adapters begin in the middle of a stage, with one, and behind whole stages
LAYOUTS = {
    1: [{}, {"recompute.mode": "full"}],
    2: [
        layout(t=2),
        layout(p=2) | ZB | {"parallel.first_layers": 1},
        layout(d=2) | {"parallel.zero": 3, "recompute.mode": "full"},
    ],
    4: [
        layout(t=2, p=2) | ZB | DIVIDED | {"parallel.first_layers": 1},
        layout(p=2, v=2, d=2) | {"model.layers": 4, "parallel.zero": 3, "adapt.first_layer": 3},
        layout(p=4) | {"model.layers": 4, "adapt.first_layer": 2, "recompute.mode": "selective"},
        layout(p=2, d=2) | ZB | {"parallel.zero": 1},
    ],
}


@pytest.mark.long
@parallel(ranks=[pytest.param(1, marks=LONG), 2, pytest.param(4, marks=LONG)])
@pytest.mark.parametrize(
    ("method", "kind"),
    [
        pytest.param(LORA, LLAMA, id="llama-lora"),
        pytest.param(IA3, {}, id="gpt-ia3", marks=LONG),
    ],
)
def test_gradients_are_those_of_the_merged_weights(comm, method, kind):
    for chosen in LAYOUTS[comm.size]:
        whole = {k: v for k, v in chosen.items() if not k.startswith("adapt.")}
        dense_engine = build(World(comm), EXACT | kind | whole)
        adapted = build(World(comm), EXACT | kind | method | FIRST | chosen)
        base, own = whole_weights(dense_engine), some_adapters(adapted)
        load(adapted, own)
        load(dense_engine, merged(base, own, adapted))
        (dense,), (found,) = steps_of(dense_engine, 1), steps_of(adapted, 1)
        assert found.loss == pytest.approx(dense.loss, rel=1e-12)
        answer = expected(base, own, whole_gradients(dense_engine), adapted)
        gradients = whole_gradients(adapted)
        assert gradients.keys() == answer.keys()
        first = adapted.config.adapt.first_layer
        assert min(int(name.split(".")[1]) for name in answer) == first
        for name, gradient in gradients.items():
            assert close(gradient, answer[name]), (chosen, name)


SAME_BITS = {
    2: [layout(p=2) | ZB | {"parallel.first_layers": 1}, layout(p=2) | {"recompute.mode": "full"}],
    4: [
        layout(p=2, v=2, d=2) | {"model.layers": 4, "adapt.first_layer": 2},
        layout(d=4) | {"parallel.zero": 3, "recompute.mode": "full", "batch.micro_size": 2},
        layout(p=4) | {"model.layers": 4, "adapt.first_layer": 2, "parallel.schedule": "zb-h1"},
    ],
}
KEPT = ("model.layers", "batch.micro_size", "adapt.first_layer")


@LONG
@parallel(ranks=[2, 4])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_bits_do_not_depend_on_the_layout(comm, precision):
    """With dropout in the adapters."""
    own = {"precision.compute": precision, "adapt.dropout": 0.1} | LORA | FIRST
    for chosen in SAME_BITS[comm.size]:
        plain = {k: v for k, v in chosen.items() if k in KEPT}
        alone = train(comm, own | plain | layout(d=chosen["parallel.data"]), steps=2)
        assert_same_bits(train(comm, own | chosen, steps=2), alone)


def kept_of(engine: Engine) -> tuple[int, int]:
    """Bytes that a forward leaves, and those foreseen."""
    memory = MemoryModel.of(engine.config, engine.vocab_size)
    batches = microbatches(engine.config, 0, 0)
    steps_of(engine, 1)
    (stage,) = engine.stages.values()
    given = passes(batches)
    stage.begin_step()
    left, _ = measured(lambda: stage.forward_microbatch(given[0], None))
    stage.backward_microbatch(given[0], None)
    return left, memory.stages.kept_bytes(engine.config.layout, 0)


@parallel(ranks=[1])
@pytest.mark.parametrize("mode", ["none", pytest.param("full", marks=LONG)])
def test_activations_are_those_of_the_account(comm, mode):
    """Each layer in front of the adapters keeps nothing."""
    changes = {"model.layers": 6, "model.hidden": 64, "model.seq_length": 32} | LLAMA | LORA
    changes |= {"recompute.mode": mode}
    found = {}
    for first in (0, 2, 4):
        engine = build(World(comm), changes | {"adapt.first_layer": first})
        left, foreseen = found[first] = kept_of(engine)
        assert 0.9 * foreseen < left <= 1.01 * foreseen, (first, left, foreseen)
        memory = MemoryModel.of(engine.config, engine.vocab_size)
        watch = engine.stopwatch()
        given = passes(microbatches(engine.config, 0, 0))
        _, peak = measured(
            lambda e=engine, g=given, w=watch: e.runner.run(e.schedule, e.program, g, w)
        )
        peaks = memory.peak(engine.config.layout, 0, engine.config.microbatches)
        assert 0.7 * (peaks.activations + peaks.working) < peak
        assert peak < 1.1 * (peaks.activations + peaks.working), (first, peak, peaks)
    (six, _), (four, _), (two, _) = found.values()
    # the embedding keeps nothing either way, the head as much
    assert six - four == pytest.approx(four - two, rel=0.01) and four < six


@pytest.mark.cases(1)
@parallel(ranks=[2])
@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("first", [pytest.param(1, marks=LONG), 2, 3])
def test_an_idle_stage_keeps_weights_alone(comm, first, half):
    """Beside what one forward works in, which is foreseen at most; where half types are widened,
    that is most of all a copy of a weight."""
    wide = {
        "model.layers": 4,
        "model.hidden": 128,
        "model.seq_length": 16,
        "precision.compute": "bf16",
    }
    changes = wide | LORA | layout(p=2) | {"adapt.first_layer": first}
    engine = build(World(comm), changes, half=half)
    steps_of(engine, 1)
    (stage,) = engine.stages.values()
    memory = foreseen_by(engine)
    rank, buffer = engine.axes["pipeline"].rank, engine.buffer
    foreseen = memory.peak(engine.config.layout, rank, engine.config.microbatches)
    assert foreseen.weights == 2 * sum(
        entry.elements for entry in (*buffer.frozen.values(), *buffer.entries.values())
    )
    own = sum(entry.elements for entry in buffer.entries.values())
    assert (foreseen.gradients, foreseen.optimizer) == (4 * own, 12 * own)
    begin, stop = min(map(int, stage.layers)), max(map(int, stage.layers)) + 1
    idle = stop <= first
    assert (own == 0) == idle == (foreseen.activations == 0) == (engine.runner.most_in_flight == 0)
    seen = []
    for number, layer in stage.layers.items():
        down = layer.mlp.down
        down.register_full_backward_hook(lambda *given, number=number: seen.append(number))
    _, peak = measured(lambda: steps_of(engine, 1))
    assert {*map(int, seen)} == {*range(max(begin, first), stop)}
    if idle:
        assert 0 < peak < 1.3 * foreseen.working, (peak, foreseen)


@parallel(ranks=[1, pytest.param(2, marks=LONG)])
def test_the_head_of_a_task_alone(comm):
    """Its gradients are those of a full training, and nothing in front of it keeps anything."""
    for chosen in (
        [{}, {"model.kind": "bert"}]
        if comm.size == 1
        else [
            layout(p=2) | {"model.kind": "bert"},
            layout(t=2) | DIVIDED,
            layout(d=2) | {"parallel.zero": 3},
        ]
    ):
        given = EXACT | CLASSES | chosen
        whole = build(World(comm), given)
        alone = build(World(comm), given | LORA | {"adapt.first_layer": 3})
        names = {name for name in whole_weights(whole) if name.startswith("sentence.")}
        load(alone, {name: one for name, one in whole_weights(whole).items() if name in names})
        (dense,), (found,) = steps_of(whole, 1), steps_of(alone, 1)
        assert found.loss == pytest.approx(dense.loss, rel=1e-12)
        answer, gradients = whole_gradients(whole), whole_gradients(alone)
        assert gradients.keys() == names
        assert all(close(one, answer[name]) for name, one in gradients.items())
        if comm.size == 1:
            left, foreseen = kept_of(alone)
            assert left <= foreseen + 64 and foreseen < 2000  # losses are three numbers more


@pytest.mark.parametrize(
    ("changes", "legal"),
    [
        (LORA | {"adapt.first_layer": 3}, "= 3, but the model has 3 layers; legal: 0 to 2, or 3"),
        (LORA | CLASSES | {"adapt.first_layer": 4}, "has 3 layers; legal: 0 to 3$"),
        (FIRST, 'adapt.method = "none" does not use adapt.first_layer; legal: remove'),
        (LORA | {"adapt.first_layer": -1}, "first_layer"),
    ],
)
def test_what_is_no_first_layer_is_one_line(changes, legal):
    with pytest.raises(InputError, match=legal):
        small(changes)


def test_model_flops_of_layers_in_front_are_those_of_a_forward():
    changes = LORA | {"model.layers": 6}
    models = [small(changes | {"adapt.first_layer": first}).model for first in (0, 2, 4)]
    every, four, two = (flops.model_flops(one, VOCAB_SIZE, 1) for one in models)
    plain = flops.layer_forward_flops(models[1], 0)
    other = flops.layer_forward_flops(models[1])
    assert plain < other and every - four == pytest.approx(four - two)
    # a layer with adapters: forward, its input's gradient, and the weights' of what trains
    core = flops.core_forward_flops(models[1])
    assert (every - four) / 2 == pytest.approx(3 * other - plain + core - core - (plain - core))
    hardware = [flops.hardware_flops(one, VOCAB_SIZE, 1, "full", layers=5) for one in models]
    assert hardware[1] - four == pytest.approx(3 * other)
    assert hardware[2] - two == pytest.approx(other)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("zero", [0, 3])
def test_a_price_has_no_backward_in_front(schedule, zero):
    """And the bounds that a search prunes by stay below it."""
    changes = LORA | {"model.layers": 8, "model.hidden": 256, "model.seq_length": 128}
    steps = []
    for first in (0, 3, 7):
        model = small(changes | {"adapt.first_layer": first}).model
        pricer = Pricer.of(load_cluster("dgx-h100"), Model("m", model, VOCAB_SIZE), 64, "bf16")
        for pipeline in (1, 2, 4):
            chosen = Layout(2, pipeline, 4, schedule=schedule, zero=zero, recompute="full")
            price = pricer.price(chosen)
            low, bound = pricer.rough_bound_s(chosen), pricer.bound_s(chosen)
            assert low <= bound * (1 + 1e-9) and bound <= price.step_time_s * (1 + 1e-9)
            assert pricer.may_fit(chosen)
            if pipeline == 1:
                steps.append((price.step_time_s, price.model_flops_per_rank, price.memory.total))
    for parts in zip(*steps, strict=True):
        assert all(one > other for one, other in itertools.pairwise(parts)), parts
