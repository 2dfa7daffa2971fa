"""Sharding as the trainer does it: bytes of a parameter, messages of a step, who sends them."""

from dataclasses import replace

import pytest

from ptdmpi.config import InputError
from ptdmpi.config.adapt import AdaptConfig
from ptdmpi.config.layout import Layout
from ptdmpi.config.model import QuantizeConfig
from ptdmpi.plan.cost.memory import CHUNK_BYTES, MemoryModel
from ptdmpi.plan.cost.price import Pricer
from ptdmpi.plan.layout.run_method import RunMethod
from ptdmpi.plan.machine.cluster import load_cluster, load_model
from ptdmpi.plan.machine.kernels import Group
from ptdmpi.plan.shape import parameters
from ptdmpi.plan.shape.parameters import ModelPart
from tests._configs import alike, small

CLUSTER, BATCH, V = load_cluster("dgx-h100"), 64, 51200
MODEL = load_model("l=8,h=1024,a=16,tie_embeddings=false")
TIED = load_model("l=8,h=1024,a=16")


def pricer_of(model=MODEL, cluster=CLUSTER, precision="bf16"):
    return Pricer.of(cluster, model, BATCH, precision)


@pytest.mark.parametrize("d", [2, 4, 8])
@pytest.mark.parametrize(
    ("compute", "state"), [("bf16", (2, 4, 12)), ("fp32", (4, 4, 8)), ("fp64", (8, 8, 16))]
)
def test_bytes_of_a_parameter(d, compute, state):
    """2 + 4 + 12/d, 2 + (4 + 12)/d, 18/d; under fp32 the master is this rank's slice of the weights
    and no second copy (Rajbhandari et al. 2020, Figure 1, with float32 gradients)."""
    memory = MemoryModel(MODEL.config, V, compute)
    weights, gradients, optimizer = state
    count = parameters.parameter_count(MODEL.config, V)
    each = {
        0: weights + gradients + optimizer,
        1: weights + gradients + optimizer / d,
        2: weights + (gradients + optimizer) / d,
        3: (weights + gradients + optimizer) / d,
    }
    for zero, bytes_ in each.items():
        layout = Layout(1, 1, d, zero=zero)
        assert memory.peak(layout, 0, 1).standing == pytest.approx(bytes_ * count, rel=1e-6)
        assert memory.parameter_bytes(layout) == pytest.approx(bytes_)
        hybrid = Layout(1, 1, 3 * d, zero=zero, shard_group=d if zero else None)
        assert memory.peak(hybrid, 0, 1).standing == pytest.approx(bytes_ * count, rel=1e-6)
        for context in (2, d):  # context ranks shard the state like data ranks
            shared = Layout(1, 1, d // context, zero=zero, context=context)
            assert memory.peak(shared, 0, 1).standing == memory.peak(layout, 0, 1).standing


def test_buffers_of_whole_units_are_counted():
    """One gradient of the largest place, and under ZeRO 3 the weights of two neighbours; a stage
    that has only layers needs a layer's, one with the vocabulary's table that."""
    memory = MemoryModel(MODEL.config, V, "bf16")
    layer, table = parameters.layer_elements(MODEL.config), V * 1024
    for rank, place in ((1, layer), (0, table + 2048 * 1024), (3, table + 2048)):
        plain = memory.peak(Layout(1, 4, 2), rank, 8).working
        two, three = (memory.peak(Layout(1, 4, 2, zero=z), rank, 8).working for z in (2, 3))
        assert (two - plain, three - plain) == (4 * place, 4 * place + 2 * (place + layer))
    one = [memory.peak(Layout(1, 1, 1, zero=z), 0, 8) for z in (0, 3)]
    assert one[0] == one[1]  # nobody to share with


def whole(model, layers, *part):
    stage = ModelPart(alike(layers), *part)
    return sum(sum(place) for place in parameters.places(model.config, V, stage))


def test_places_have_all_parameters():
    for model in (MODEL, TIED):
        for t in (1, 4):
            found = whole(model, 2, True, False, t) + whole(model, 6, False, True, t)
            every = 8 * parameters.layer_elements(model.config, t)
            every += parameters.embedding_elements(model.config, V, t)
            assert found == every + parameters.head_elements(model.config, V, t)
    places = parameters.places(TIED.config, V, ModelPart(alike(1), True, True))
    assert [len(units) for units in places] == [2, 1, 2] and places[0][0] == places[2][
        0
    ] == V * 1024
    assert len(parameters.places(MODEL.config, V, ModelPart(alike(8), True, True))) == 10


@pytest.mark.parametrize("group", [None, 2])
def test_messages_behind_the_pipeline(group, monkeypatch):
    """psi gradients of 4 bytes and weights of 2: Rajbhandari et al. 2020, section 7."""
    pricer, psi, shards = pricer_of(), whole(MODEL, 8, True, True), group or 8
    for name, by in (("all_gather_s", 1.0), ("reduce_scatter_s", 10.0), ("all_reduce_s", 100.0)):
        monkeypatch.setattr(
            pricer.machine, name, lambda size, group, by=by: by * size * (group.ranks > 1)
        )
    copies = 100 * 4 * psi / shards if group else 0.0
    for zero, sums, gathers in ((1, 10 * 4 * psi, 2 * psi), (2, 0, 2 * psi), (3, 0, 0)):
        behind = pricer.times.data.behind(Layout(1, 1, 8, zero=zero, shard_group=group), psi)
        norms = 4 * psi / 256  # of rows, gathered
        assert behind == pytest.approx((sums + copies + norms, gathers))
    assert pricer.times.data.behind(Layout(1, 1, 8), psi) == pytest.approx((100 * 4 * psi, 0))


@pytest.mark.parametrize("model", [MODEL, TIED])
def test_a_step_of_m_microbatches_sends_m_times(model, monkeypatch):
    """ZeRO 2 a sum, ZeRO 3 also two gathers of a stage, less the place that stays between forward
    and backward of 1F1B."""
    pricer = pricer_of(model)
    monkeypatch.setattr(pricer.machine, "stream_s", lambda size: 0.0)
    for name, per_byte in (("all_gather_s", 1.0), ("reduce_scatter_s", 10.0)):
        monkeypatch.setattr(pricer.machine, name, lambda size, group, by=per_byte: by * size)
    places = parameters.places(model.config, V, ModelPart(alike(8), True, True))
    psi, first, last = whole(model, 8, (True, True), 1), sum(places[0]), sum(places[-1])
    two, three = (
        pricer.times.data.in_ops(Layout(1, 1, 8, zero=z), ModelPart(alike(8), True, True))
        for z in (2, 3)
    )
    assert two[:2] == pytest.approx((0.0, 40 * psi))
    assert three[:2] == pytest.approx((2 * (psi - first), 2 * (psi - last) + 40 * psi))
    again = pricer.times.data.in_ops(
        Layout(1, 1, 8, schedule="gpipe", zero=3), ModelPart(alike(8), True, True)
    )
    assert again[:2] == pytest.approx((2 * psi, 2 * psi + 40 * psi))


def test_frozen_weights_are_gathered_as_those_that_train_and_never_summed(monkeypatch):
    """Adapters next to a frozen layer: gathers of a whole model's bytes and theirs; sums of theirs
    alone. In few bits nothing is sent of it."""
    adapt = AdaptConfig(method="lora", rank=8)
    few_bits = QuantizeConfig(weights="nf4", block=64)
    given = {
        "whole": MODEL.config,
        "frozen": MODEL.config.adapted(adapt),
        "packed": MODEL.config.adapted(adapt, few_bits),
    }
    found = {}
    for name, config in given.items():
        pricer = pricer_of(replace(MODEL, config=config))
        monkeypatch.setattr(pricer.machine, "stream_s", lambda size: 0.0)
        for what, per_byte in (("all_gather_s", 1.0), ("reduce_scatter_s", 1e6)):
            monkeypatch.setattr(pricer.machine, what, lambda size, group, by=per_byte: by * size)
        layout = Layout(1, 1, 8, schedule="gpipe", zero=3)
        forward, backward, _ = pricer.times.data.in_ops(layout, ModelPart(alike(8), False, False))
        found[name] = forward, (backward - forward) / 1e6
    psi = 8 * parameters.layer_elements(MODEL.config, 1)
    adapters = 8 * parameters.trained_elements(given["frozen"], 1)
    assert found["whole"] == pytest.approx((2 * psi, 4 * psi), rel=1e-4)
    assert found["frozen"] == pytest.approx((2 * (psi + adapters), 4 * adapters), rel=1e-3)
    assert found["packed"][0] < 0.1 * found["frozen"][0]
    assert found["packed"][1] == pytest.approx(4 * adapters, rel=1e-3)


def test_groups_are_neighbours_in_a_node():
    data = pricer_of().times.data
    assert data.shard_group(Layout(2, 1, 16, zero=1)) == Group(16, 4)
    hybrid = Layout(2, 1, 16, zero=1, shard_group=4)
    assert data.shard_group(hybrid) == Group(4, 4) and data.replicas(hybrid) == Group(4, 1)
    small = Layout(2, 1, 16, zero=3, shard_group=2)
    assert data.shard_group(small) == Group(2, 2) and data.replicas(small) == Group(8, 2)


def test_what_is_sent_in_ops_fills_the_pipeline_too():
    """With m microbatches and p stages ZeRO 3's messages are waited for m + p - 1 times."""
    pricer = pricer_of()
    plain = Layout(1, 4, 2)
    price, full = pricer.price(plain), pricer.price(replace(plain, zero=3))
    more = sum(pricer.times.data.in_ops(full.layout, ModelPart(alike(2), False, False))[:2])
    assert full.step_time_s - price.step_time_s > 32 * more
    assert sum(vars(full.parts).values()) == pytest.approx(full.step_time_s)
    assert full.parts.data > 32 * more and full.parts.compute == pytest.approx(price.parts.compute)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_a_device_that_overlaps_hides_messages_of_every_stage(zero):
    pricer = pricer_of(load_model("llama3-70b"))
    layout = Layout(8, 4, 2, micro_size=2, zero=zero)
    shown, hidden = (pricer.price(replace(layout, dp_overlap=overlap)) for overlap in (False, True))
    assert 0 < hidden.parts.data < 0.8 * shown.parts.data
    assert hidden.step_time_s < shown.step_time_s
    assert hidden.parts.compute == pytest.approx(shown.parts.compute)


def test_the_update_is_shared_out():
    pricer = pricer_of()
    at = [pricer.times.update.optimizer_s(Layout(1, 1, 8, zero=z), 1e9) for z in range(4)]
    assert at[0] / 8 < at[1] < at[0] / 4 and at[2] == at[3] == pytest.approx(at[0] / 8, rel=0.01)
    hybrid = pricer.times.update.optimizer_s(Layout(1, 1, 8, zero=2, shard_group=2), 1e9)
    assert hybrid == pytest.approx(at[0] / 2, rel=0.01)


def test_an_update_in_one_pass():
    """38 bytes of a parameter instead of 50: the norm, and the pass; it also sets to zero the
    gradients of its shard alone. Not of other optimizers, nor on the host."""
    software = CLUSTER.software.model_copy(update={"triton": ("update",)})
    cluster = CLUSTER.model_copy(update={"software": software})
    other = RunMethod(one_pass=False)

    def bytes_of(layout, method=None, cluster=cluster):
        times = Pricer.of(cluster, MODEL, BATCH, "bf16", method=method).times
        return times.update.optimizer_s(layout, 1e9) * times.machine.memory_rate / 1e9

    plain, sharded = Layout(1, 1, 4), Layout(1, 1, 4, zero=1)
    assert bytes_of(plain) == pytest.approx(4 + 34)
    assert bytes_of(plain, cluster=CLUSTER) == pytest.approx(50)
    assert bytes_of(plain, other) == pytest.approx(50)
    assert bytes_of(sharded) == pytest.approx((4 + 34) / 4 + 3)
    away = replace(plain, offload="optimizer")
    assert bytes_of(away) == bytes_of(away, cluster=CLUSTER)


@pytest.mark.parametrize(
    ("changes", "one_pass"),
    [
        ({}, True),
        ({"optimizer.kind": "lion"}, False),
        ({"optimizer.kind": "muon"}, False),
        ({"data_parallel.method": "decentralized"}, False),
    ],
)
def test_which_updates_have_one_pass(changes, one_pass):
    assert RunMethod.of(small(changes, 2)).one_pass == one_pass


def test_an_offloaded_optimizer_is_in_the_hosts_memory():
    pricer = pricer_of()
    plain, away = (Layout(1, 1, 8, zero=1, offload=place) for place in ("none", "optimizer"))
    here, there = pricer.footprint(plain), pricer.footprint(away)
    # and room for the gradients (4 bytes) of what this rank updates, which keeps 12
    assert (there.optimizer, there.host) == (0, here.optimizer + here.optimizer / 3)
    assert there.total == here.total - here.optimizer and sum(there.parts.values()) == there.total
    slow, fast = (pricer.times.update.optimizer_s(layout, 8e9) for layout in (away, plain))
    host = CLUSTER.host
    up_and_down = 1e9 * (4 + 2) / host.link_bytes_per_s
    assert slow > fast + up_and_down
    assert slow - fast < up_and_down + 1e9 * 56 / (host.memory_bytes_per_s / 8)
    # 2 TB of a node, 250 GB a rank
    huge = pricer_of(load_model("l=16,h=16384,a=128"))
    layout = Layout(1, 1, 1, recompute="full", offload="optimizer")
    assert huge.footprint(layout).host > 250e9 and not huge.fits(layout)
    assert not huge.price(layout).fits


def test_on_a_cpu_the_hosts_memory_is_the_devices():
    cluster = load_cluster("cpu-avx2")
    pricer = pricer_of(cluster=cluster, precision="fp32")
    plain, away, disk = (Layout(1, 1, 2, offload=o) for o in ("none", "optimizer", "disk"))
    assert pricer.footprint(away) == pricer.footprint(plain)
    assert pricer.price(away).step_time_s == pricer.price(plain).step_time_s
    held = pricer.footprint(disk)
    assert (held.optimizer, held.host) == (2 * CHUNK_BYTES, 0)
    with pytest.raises(
        InputError, match=r"cpu-avx2: offload = .disk. has no known time without host\.d"
    ):
        pricer.price(disk)
    host = cluster.host.model_copy(update={"disk_bytes_per_s": 1e9})
    known = pricer_of(cluster=cluster.model_copy(update={"host": host}), precision="fp32")
    more = known.price(disk).step_time_s - known.price(plain).step_time_s
    state = pricer.footprint(plain).optimizer
    assert more == pytest.approx(2 * state / (1e9 / 2), rel=0.01)


def test_places_that_a_cluster_file_does_not_know_are_refused():
    pricer = pricer_of(cluster=load_cluster("v100-dgx2"), precision="fp16")
    keys = "host.memory_bytes and host.memory_bytes_per_s and host.link_bytes_per_s"
    with pytest.raises(InputError, match=keys) as error:
        pricer.price(Layout(1, 1, 1, offload="optimizer"))
    assert "\n" not in str(error.value)
