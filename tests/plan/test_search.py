"""The search finds what pricing every layout finds."""

import math
from dataclasses import replace

import pytest

from ptdmpi.config import InputError
from ptdmpi.plan.cluster import load_cluster, load_model
from ptdmpi.plan.layout import Layout
from ptdmpi.plan.price import Pricer
from ptdmpi.plan.search import (
    Space,
    chunked,
    compute_optimal,
    difference,
    groups,
    heuristic,
    improvements,
    microbatch_model,
    neighbours,
    search,
)

SELENE = load_cluster("selene")
MODELS = ("l=7,h=512,a=8", "l=12,h=1024,a=16,V=32000")


def small(model, memory_bytes, batch=24, cluster=SELENE):
    memory = {"memory_bytes": memory_bytes, "runtime_bytes": 0.0}
    device = cluster.device.model_copy(update=memory)
    return Pricer(cluster.model_copy(update={"device": device}), load_model(model), batch, "fp16")


def everything(pricer, space):
    layers = pricer.model.config.layers
    return [
        pricer.price(layout)
        for group in groups(space, pricer)
        for layout in chunked(space, group, layers)
    ]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("memory_bytes", [1.5e9, 80e9])
@pytest.mark.parametrize("cluster", ["selene", "dgx-h100"])
def test_pruning_keeps_the_best(model, memory_bytes, cluster):
    pricer = small(model, memory_bytes, 12, load_cluster(cluster))
    space = Space(8, recompute=None)
    prices = everything(pricer, space)
    fitting = sorted(price.step_time_s for price in prices if price.fits)
    assert len(fitting) > 5 and (memory_bytes > 2e9 or len(fitting) < len(prices))
    found = search(pricer, space)
    assert [price.step_time_s for price in found] == pytest.approx(fitting[:5])


def test_bounds_are_below_the_simulation():
    pricer = small(MODELS[0], 80e9)
    for price in everything(pricer, Space(12, dp_overlap=False)):
        bound_s = pricer.bound_s(price.layout)
        assert pricer.rough_bound_s(price.layout) <= bound_s * (1 + 1e-9)
        assert bound_s <= price.step_time_s * (1 + 1e-9)


def test_what_is_given_is_kept():
    pricer = small(MODELS[0], 80e9)
    space = Space(8, "gpipe", "full", sequence_parallel=False, zero=1, dp_overlap=True)
    for price in search(pricer, space):
        layout = price.layout
        assert (layout.schedule, layout.recompute, layout.zero) == ("gpipe", "full", 1)
        assert layout.dp_overlap and not layout.sequence_parallel
        assert layout.ranks == 8


def test_nothing_fits_or_is_legal():
    with pytest.raises(InputError, match=r"no layout .* fits on 8 ranks .* MiB per rank"):
        search(small(MODELS[0], 1e6), Space(8))
    with pytest.raises(InputError, match="is legal"):
        search(small(MODELS[0], 80e9, batch=1), Space(13))


def test_single_changes_make_a_layout_fit_or_faster():
    pricer = Pricer(SELENE, load_model("megatron-145b"), 64, "fp16")
    slow = pricer.price(Layout(8, 16, 1))
    at_once, changes = improvements(slow, pricer)
    assert at_once == 1 and changes
    assert all(other.fits and other.step_time_s < slow.step_time_s for other in changes)
    too_much = pricer.price(Layout(8, 16, 1, micro_size=4))
    assert not too_much.fits
    at_once, changes = improvements(too_much, pricer)
    assert at_once == 1 and changes and all(other.fits for other in changes)
    for layout in neighbours(too_much.layout, pricer):
        assert layout.ranks == 128


@pytest.mark.parametrize("memory_bytes", [3e9, 0.6e9])
def test_two_changes_where_no_single_one_suffices(memory_bytes):
    """The best pairs, found by trying all; where there are none, what saves most memory."""
    pricer = small(MODELS[1], memory_bytes)
    price = pricer.price(Layout(1, 2, 4, micro_size=3))
    single = set(neighbours(price.layout, pricer))
    assert not any(pricer.fits(layout) for layout in (price.layout, *single))
    pairs = {two for one in single for two in neighbours(one, pricer)}
    times = sorted(pricer.price(layout).step_time_s for layout in pairs if pricer.fits(layout))
    at_once, changes = improvements(price, pricer)
    if times:
        assert at_once == 2
        assert [other.step_time_s for other in changes] == pytest.approx(times[:3])
    else:
        assert at_once == 1
        least = min(pricer.memory(layout).total for layout in single)
        assert changes[0].memory.total == least
    assert bool(times) == (memory_bytes > 1e9)


def test_a_difference_names_what_is_other():
    layout = Layout(8, 16, 1)
    assert difference(layout, replace(layout, tensor=4, data=2)) == "t=4, d=2"
    other = replace(layout, recompute="full", sequence_parallel=True, scatter_gather=False, zero=1)
    words = "recompute full, --sequence-parallel, --no-scatter-gather, --zero 1"
    assert difference(layout, other) == words


def test_the_papers_rules():
    """GPT-3 on 1024 GPUs: t = 8 in the node, p as small as fits."""
    pricer = Pricer(SELENE, load_model("gpt3-175b"), 1536, "fp16")
    price = heuristic(pricer, Space(1024))
    assert price.fits and price.layout.tensor == 8
    fewer = replace(price.layout, pipeline=price.layout.pipeline // 2, micro_size=1)
    fewer = replace(fewer, data=2 * price.layout.data)
    assert pricer.memory(fewer).total > pricer.capacity_bytes
    times = microbatch_model(pricer, price.layout)
    stages = pricer.stage_seconds(replace(price.layout, micro_size=1))
    slowest = max(forward.total + backward.total for forward, backward in stages)
    per_replica = 1536 // price.layout.data
    assert times[1] == pytest.approx((per_replica + price.layout.pipeline - 1) * slowest)


def test_compute_optimal_is_chinchillas():
    """Hoffmann et al. 2022, Table 3: 67e9 parameters for 5.76e23 FLOPs, 1.5e12 tokens."""
    name, tokens, optimal = compute_optimal(5.76e23, {"a": 10**9, "b": 67 * 10**9, "c": 10**12})
    assert name == "b"
    assert optimal == pytest.approx(67e9, rel=0.05)
    assert tokens == pytest.approx(1.5e12, rel=0.06)
    assert math.isclose(6 * 67e9 * tokens, 5.76e23)
