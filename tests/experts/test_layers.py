"""Models in which only some layers have experts: which layers, and what a plan counts of them."""

from dataclasses import replace

import pytest

from ptdmpi.config.kinds import LayerKind
from ptdmpi.config.layout import Layout
from ptdmpi.plan.cost.price import Pricer
from ptdmpi.plan.machine.cluster import Model, load_cluster, load_model
from ptdmpi.plan.search.search import search
from ptdmpi.plan.search.space import Space
from ptdmpi.plan.shape import flops, parameters
from tests._configs import small

MIXED = {"model.kind": "llama", "model.layers": 7, "model.experts": 8}
MIXED |= {"model.experts_per_token": 2, "model.expert_hidden": 32, "model.ffn_hidden": 96}
VOCAB_SIZE = 53


@pytest.mark.parametrize(
    ("dense", "every", "layers"),
    [(0, 1, (0, 1, 2, 3, 4, 5, 6)), (2, 1, (2, 3, 4, 5, 6)), (0, 2, (1, 3, 5)), (3, 3, (5,))],
)
def test_which_layers_have_experts(dense, every, layers):
    model = small(MIXED | {"model.dense_layers": dense, "model.moe_every": every}).model
    assert model.mixing_layers == layers
    for part in (range(7), range(2, 5), range(6, 7), range(0)):
        kinds = [kind for kind, count in model.runs(part) for _ in range(count)]
        assert kinds == [LayerKind(layer in layers) for layer in part]
    assert all(a.kind != b.kind for a, b in zip(model.runs(), model.runs()[1:], strict=False))


def test_parameters_and_flops_are_sums_over_the_layers():
    model = small(MIXED | {"model.dense_layers": 2, "model.moe_every": 2}).model
    h, attention = 32, 4 * 32 * 32
    norms, router = 2 * h, 8 * h + 8  # the router has a bias for the balance
    dense, expert = 3 * h * 96, 3 * h * 32
    count = 7 * (attention + norms) + 5 * dense + 2 * (router + 8 * expert)
    ends = 2 * VOCAB_SIZE * h + h
    assert parameters.parameter_count(model, VOCAB_SIZE) == count + ends
    assert parameters.active_count(model, VOCAB_SIZE) == count + ends - 2 * 6 * expert
    scores = 2 * 16 * h
    per_token = 7 * (attention + scores) + 5 * dense + 2 * (8 * h + 2 * expert) + VOCAB_SIZE * h
    assert flops.model_flops(model, VOCAB_SIZE, 10) == 3 * 2 * per_token * 10
    again = flops.hardware_flops(model, VOCAB_SIZE, 10, "full", layers=4)
    first = 4 * (attention + scores) + 3 * dense + 8 * h + 2 * expert
    assert again - flops.model_flops(model, VOCAB_SIZE, 10) == 2 * first * 10


LAYOUTS = [
    Layout(1, 2, 4, micro_size=1),
    Layout(1, 4, 2, micro_size=1, expert=2, recompute="full", recompute_layers=3),
    Layout(2, 2, 2, micro_size=1, schedule="interleaved", virtual=3, zero=1),
    Layout(1, 1, 8, micro_size=2, expert=4, zero=2, recompute="selective"),
    Layout(1, 2, 4, micro_size=2, zero=3),
    Layout(2, 2, 2, micro_size=1, schedule="zb-h1"),
]


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_no_price_is_below_its_bounds(layout, every):
    changes = {"model.layers": 12, "model.dense_layers": 3, "model.moe_every": every}
    changes |= {"model.hidden": 1024, "model.seq_length": 2048, "model.ffn_hidden": 8192}
    model = Model("some", small(MIXED | changes).model, 50000)
    pricer = Pricer.of(load_cluster("dgx-h100"), model, 32, "bf16")
    price, bound_s = pricer.price(layout), pricer.bound_s(layout)
    assert 0 < pricer.rough_bound_s(layout) <= bound_s * 1.000001 <= price.step_time_s * 1.000002
    assert pricer.may_fit(layout)
    peaks = [pricer.memory.peak(layout, r, layout.microbatches(32)) for r in range(layout.pipeline)]
    assert pricer.footprint(layout).total == max(peak.total for peak in peaks)
    whole = replace(layout, pipeline=1, virtual=1, schedule="1f1b", data=1, expert=1, zero=0)
    trained = sum(pricer.memory.stages.trained(layout, r) for r in range(layout.pipeline))
    if layout.expert == 1:
        assert trained == pricer.memory.stages.trained(whole, 0)


@pytest.mark.long
def test_the_search_finds_a_layout_for_a_published_model():
    model = load_model("deepseek-moe-16b")
    assert model.config.runs() == ((LayerKind(), 1), (LayerKind(mixes=True), 27))
    pricer = Pricer.of(load_cluster("dgx-h100"), model, 64, "bf16")
    best = search(pricer, Space(32))[0]
    assert best.fits and best.mfu > 0.1
