"""Kernels of a layer that a program adds or spares, counted by hand."""

from dataclasses import replace

import pytest

from ptdmpi.config import AdaptConfig
from ptdmpi.config.layout import Layout
from ptdmpi.config.model import QuantizeConfig
from ptdmpi.plan.cost.data_axis import VIEW_S, DataAxis
from ptdmpi.plan.cost.layer import LayerTimes
from ptdmpi.plan.cost.price import Pricer
from ptdmpi.plan.machine.cluster import load_cluster, load_model
from ptdmpi.plan.machine.kernels import Group, Machine
from ptdmpi.plan.machine.measured import machine_of
from ptdmpi.plan.shape.parameters import ModelPart
from tests._configs import alike

SELENE = load_cluster("selene")
MODEL = load_model("l=2,h=4096,a=32")
S = 2048


@pytest.fixture(scope="module")
def machine():
    return Machine(SELENE, "fp16", 2)


def core(machine, model, layout, backward=False):
    times = LayerTimes(machine, model, layout)
    (row,) = (row for row in times.rows if row.recomputed_selectively)
    return times.seconds(row.core(times.sizes, backward), ()).compute


@pytest.mark.parametrize(("backward", "fused", "plain"), [(False, 3, 37), (True, 4, 49)])
def test_two_heads_of_a_microbatch_have_no_fused_softmax(machine, backward, fused, plain):
    """At t = 16 two of 32 heads are left. Products, dropout and what is moved per score are the
    same, so two microbatches of two heads differ from one of four by the softmax alone."""
    layout = Layout(8, 1, 1)
    four = core(machine, MODEL, layout, backward)
    two = core(machine, MODEL, replace(layout, tensor=16), backward)
    more_s = 2 * S * S * (plain - fused) / machine.memory_rate
    products_s = core(machine, MODEL, replace(layout, tensor=16, micro_size=2), backward) - four
    assert products_s == pytest.approx(0.0, abs=1e-12)
    assert two == pytest.approx(four / 2 + more_s, rel=0.1)
    longer = load_model("l=2,h=4096,a=32,s=4096")
    assert core(machine, longer, layout, backward) > 6 * four


def test_the_bias_of_query_key_value_is_a_kernel_of_the_published_program(machine):
    layout = Layout(8, 1, 1)
    bias_s = machine.stream_s(S * 3 * 4096 // 8 * 4)
    without = load_model("l=2,h=4096,a=32,bias=false")
    found = LayerTimes(machine, MODEL, layout).forward.compute
    assert found - LayerTimes(machine, without, layout).forward.compute == pytest.approx(bias_s)


def test_messages_of_a_context_axis_are_priced_by_their_method(machine):
    """Each of four ranks has 512 positions, with 4096 elements of two bytes in queries, keys,
    values and outputs."""
    layout, part_bytes, group = Layout(1, 1, 1, context=4), 512 * 4096 * 2, Group(4, 4)

    def found(method):
        times = LayerTimes(machine, MODEL, replace(layout, context_method=method))
        return times.forward.context

    assert found("all_gather") == machine.all_gather_s(2 * 4 * part_bytes, group)
    exchanges = [machine.all_to_all_s(count * part_bytes, group) for count in (3, 1)]
    assert found("ulysses") == pytest.approx(sum(exchanges))
    visits = 3 * machine.send_s(2 * part_bytes, crosses_nodes=False)
    assert found("ring") == pytest.approx(visits)


@pytest.mark.parametrize("length", [2048, 65536])
def test_the_products_of_a_ring_hide_its_messages_where_neighbours_overlap(length):
    """Keys and values travel during Q K^T and P V of the two pairs of chunks of each visit."""
    machine = machine_of(load_cluster("dgx-h100"), "bf16", 2)
    model = load_model(f"l=2,h=4096,a=32,s={length}")
    times = LayerTimes(machine, model, Layout(1, 1, 1, context=4, context_method="ring"))
    chunk = length // 8
    send_s = machine.send_s(4 * chunk * 4096 * 2, crosses_nodes=False)
    hidden_s = 2 * (machine.gemm_s(chunk, chunk, 128, 32) + machine.gemm_s(chunk, 128, chunk, 32))
    assert times.forward.context == pytest.approx(3 * max(0.0, send_s - hidden_s))
    assert (times.forward.context == 0.0) == (length == 65536)
    # the gradients' return to their own rank is never hidden
    home_s = machine.send_s(4 * chunk * 4096 * 4, crosses_nodes=False)
    assert times.backward.context >= home_s
    assert (times.backward.context == pytest.approx(home_s)) == (length == 65536)


@pytest.mark.parametrize("quantized", [False, True])
def test_the_product_of_the_queries_hides_the_gather_of_keys(quantized):
    """It is a product of its own, unless the weight is quantized; so is its backward."""
    model = load_model("l=2,h=4096,a=32,kv_heads=8,s=65536")
    if quantized:
        config = model.config.adapted(AdaptConfig(), QuantizeConfig(weights="nf4"))
        model = replace(model, config=config)
    layout = Layout(1, 1, 1, context=8)
    cluster = load_cluster("dgx-h100")
    exposed = cluster.software.model_copy(update={"overlap_context": False})
    usual, early = (
        LayerTimes(machine_of(one, "bf16", 2), model, layout)
        for one in (cluster.model_copy(update={"software": exposed}), cluster)
    )
    if quantized:
        assert early.forward == usual.forward and early.backward == usual.backward
        return
    rows, machine = 65536 // 8, early.machine
    query_s = machine.gemm_s(rows, 4096, 4096)
    both_s = machine.gemm_s(rows, 2048, 4096)
    assert early.forward.context == pytest.approx(usual.forward.context - query_s)
    more_s = query_s + both_s - machine.gemm_s(rows, 4096 + 2048, 4096)
    assert early.forward.compute == pytest.approx(usual.forward.compute + more_s)
    gradients_s = query_s + machine.gemm_s(4096, 4096, rows)
    expected_s = max(0.0, usual.backward.context - gradients_s)
    assert early.backward.context == pytest.approx(expected_s)
    # the gradients of weights are computed later, in W
    inputs_s = usual.split_backward.context - query_s
    assert early.split_backward.context == pytest.approx(inputs_s)


def test_tensors_are_all_parameters_of_a_layer(machine):
    for tensor in (1, 8):
        tensors = DataAxis(machine, MODEL).layer_tensors(tensor)
        weights, h = 12 * 4096**2 // tensor, 4096
        assert sum(tensors) == weights + 7 * h // tensor + 2 * h + 4 * h


def test_lists_of_parts_cost_by_their_number():
    """ZeRO 3 as published: a view and a copy for each rank's part of each of twelve tensors."""
    pricer = Pricer.of(SELENE, MODEL, 512, "fp16")
    layouts = [Layout(1, 1, d, micro_size=512 // d, zero=3) for d in (256, 512)]
    stage = ModelPart(alike(2), True, True)
    few, many = (sum(pricer.times.data.in_ops(one, stage)[:2]) for one in layouts)
    each_s = VIEW_S + SELENE.device.kernel_s
    small = 2 * 8  # biases and norms, whose bytes are next to nothing
    assert many - few > small * 3 * 256 * each_s
    newer = Pricer.of(load_cluster("dgx-h100"), MODEL, 512, "bf16")
    assert sum(newer.times.data.in_ops(layouts[1], stage)[:2]) < many / 8


def test_experts_of_several_ranks_are_priced_as_they_are_computed():
    """Eight ranks have two of 16 experts each: an expert has one product for the tokens of all
    ranks, or, at one microbatch a rank, one for each rank's, whose gradients are added apart."""
    model = load_model(
        "l=2,h=4096,a=32,kind=llama,experts=16,experts_per_token=8,expert_hidden=2048"
    )
    pricer = Pricer.of(load_cluster("h100"), model, 8, "bf16")
    layout, kind = Layout(1, 1, 8, expert=8), model.config.kind_of(1)
    apart, together = (pricer.times.layer(layout, kind, many) for many in (1, 2))
    alone = pricer.times.layer(Layout(1, 1, 8), kind, 1)
    # up, down, their gradients and those of their weights, in 16 segments or in two
    gained = [mine - theirs for mine, theirs in zip(apart.launches, together.launches, strict=True)]
    assert gained[0] >= 14 * 5 and gained[1] >= 14 * 10
    assert apart.backward.compute > 1.5 * together.backward.compute
    assert alone.backward.compute > together.backward.compute
    backwards = [pricer.times.stage_seconds(layout, many)[0][1].compute for many in (1, 2)]
    assert backwards[0] > 1.5 * backwards[1]


def test_no_layer_is_faster_than_its_host(machine):
    """17 kernels and messages forwards at t = 8, 35 backwards; what takes longer is as before."""
    small, layout = load_model("l=4,h=1024,a=16"), Layout(8, 1, 1)
    layer = LayerTimes(machine, small, layout)
    assert layer.launches == (17, 35)
    launch_s = SELENE.software.launch_s
    assert layer.forward.total == pytest.approx(17 * launch_s)
    assert layer.backward.launched.compute == pytest.approx(35 * launch_s - layer.backward.messages)
    pricer = Pricer.of(SELENE, small, 8, "fp16")
    forward, backward = pricer.times.stage_seconds(layout, 8)[0]
    assert forward.total > 4 * 17 * launch_s and backward.total > 4 * 35 * launch_s
    large = LayerTimes(machine, load_model("l=4,h=12288,a=96"), layout)
    assert large.forward.total == large.forward.compute + large.forward.messages


LIKE = Layout(2, 4, 2, 2, schedule="interleaved", recompute="selective")
CHANGES = [
    {"recompute": "full", "recompute_layers": 3},
    {"recompute": "full", "partition_activations": True},
    {"sequence_parallel": True},
    {"virtual": 1, "schedule": "zb-h1"},
    {"first_layers": 1},
    {"micro_size": 2},
]


@pytest.mark.parametrize("changes", CHANGES, ids=str)
def test_stored_times_of_stages_are_those_of_a_new_pricer(changes):
    """A pricer computes the times of stages once for all shardings, and again for each other
    layout."""
    model = load_model("l=16,h=4096,a=32")
    pricer = Pricer.of(SELENE, model, 16, "fp16")
    many = LIKE.microbatches(16)
    before, bound_s = pricer.times.stage_seconds(LIKE, many), pricer.bound_s(LIKE)
    assert pricer.times.stage_seconds(replace(LIKE, zero=2), many) is before
    other = replace(LIKE, **changes)
    fresh = Pricer.of(SELENE, model, 16, "fp16")
    stored, new = (one.times.stage_seconds(other, many) for one in (pricer, fresh))
    assert stored == new != before
    assert pricer.bound_s(other) == fresh.bound_s(other) != bound_s
    assert pricer.fits(other) == fresh.fits(other)
    assert pricer.footprint(other) == fresh.footprint(other)
