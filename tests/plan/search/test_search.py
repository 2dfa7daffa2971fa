"""The search finds what pricing every layout finds."""

import itertools
import math
import random
from dataclasses import replace

import pytest

from ptdmpi.config import InputError
from ptdmpi.config.choices import CONTEXT_METHODS, RECOMPUTE_MODES
from ptdmpi.config.layout import Layout
from ptdmpi.plan.cost.price import Pricer
from ptdmpi.plan.layer.legality import is_legal
from ptdmpi.plan.machine.cluster import load_cluster, load_model
from ptdmpi.plan.search.advice import (
    difference,
    groups,
    heuristic,
    improvements,
    microbatch_model,
    neighbours,
)
from ptdmpi.plan.search.search import search
from ptdmpi.plan.search.space import Space, contexts

SELENE = load_cluster("selene")
MODELS = ("l=7,h=512,a=8", "l=12,h=1024,a=16,V=32000")


def small(model, memory_bytes, batch=24, cluster=SELENE):
    memory = {"memory_bytes": memory_bytes, "runtime_bytes": 0.0}
    device = cluster.device.model_copy(update=memory)
    return Pricer.of(
        cluster.model_copy(update={"device": device}), load_model(model), batch, "fp16"
    )


def shared(pricer, t, c, d):
    """Every way to shard over the c d ranks with the same part of the model, which are t ranks
    apart: over all of them, or over those that a node has."""
    near, every = pricer.cluster.node.devices // t, c * d
    legal = [n for n in range(1, every + 1) if c % n == 0 or (n % c == 0 and d % (n // c) == 0)]
    sizes = [size for size in legal if size <= max(1, near)]
    inside = [size for size in sizes if size > 1 and (near % size == 0 or every <= near)]
    node = max(inside or sizes)
    groups = {None} | ({node} if 1 < node < every else set())
    stages = [(0, None), *itertools.product((1, 2, 3), groups)] if every > 1 else [(0, None)]
    return itertools.product(stages, ("none", "optimizer"))


def partial(pricer, layout):
    """The layout with fewer layers recomputed: the fewest that fit, one by one, and one more."""
    if layout.pipeline > 1 or pricer.fits(replace(layout, recompute="none")):
        return ()
    counts = range(1, pricer.model.config.layers)
    some = (replace(layout, recompute_layers=count) for count in counts)
    return itertools.islice((one for one in some if pricer.fits(one)), 2)


def even(pricer, ranks, dp_overlap=False, modes=RECOMPUTE_MODES, cuts=(1,)):
    """Every layout that training accepts, with nothing sharded and stages as the split has them."""
    for c, t, p, d in itertools.product(cuts, *[range(1, ranks + 1)] * 3):
        if t * c * p * d != ranks:
            continue
        for b, v in itertools.product(range(1, pricer.batch + 1), range(1, 13)):
            if p == 1 and v > 1:
                continue
            for kind, mode in itertools.product(("gpipe", "1f1b", "interleaved"), modes):
                methods = CONTEXT_METHODS if c > 1 else CONTEXT_METHODS[:1]
                switches = itertools.product((False, True), (False, True), methods)
                for sequence, scatter, method in switches:
                    sizes = (t, p, d, v, b, kind, mode, sequence and t > 1, scatter)
                    layout = Layout(*sizes, dp_overlap=dp_overlap, context=c, context_method=method)
                    if is_legal(layout, pricer.model.config, pricer.batch):
                        yield layout


def everything(pricer, ranks, dp_overlap=False, modes=RECOMPUTE_MODES, partly=False, cuts=(1,)):
    """Prices of all layouts that training accepts, by trying all settings."""
    found = []
    for layout in even(pricer, ranks, dp_overlap, modes, cuts):
        axes = (layout.tensor, layout.context, layout.data)
        for (zero, group), place in shared(pricer, *axes):
            one = replace(layout, zero=zero, shard_group=group, offload=place)
            some = partial(pricer, one) if partly and layout.recompute == "full" else ()
            found += [one, *some]
    return [pricer.price(layout) for layout in set(found)]


@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "memory_bytes", "cluster"),
    [
        *((model, 1.5e9, "selene") for model in MODELS[:2]),
        *((model, 80e9, "dgx-h100") for model in MODELS),
    ],
)
def test_pruning_keeps_the_best(model, memory_bytes, cluster):
    pricer = small(model, memory_bytes, 12, load_cluster(cluster))
    prices = everything(pricer, 8, partly=True)
    fitting = [price for price in prices if price.fits]
    assert len(fitting) > 5 and (memory_bytes > 2e9 or len(fitting) < len(prices))
    best: dict[str, float] = {}  # of layouts of the same sizes
    for price in fitting:
        sizes = str(price.layout)
        best[sizes] = min(price.step_time_s, best.get(sizes, math.inf))
    found = search(pricer, Space(8))
    assert [price.step_time_s for price in found] == pytest.approx(sorted(best.values())[:5])
    assert [price.step_time_s for price in found] == [best[str(price.layout)] for price in found]
    for tie in (0.02, 0.3, 2.0):
        limit_s = found[0].step_time_s * (1 + tie)
        near = [price for price in fitting if price.step_time_s < limit_s]
        first, *_ = simple = search(pricer, Space(8), tie=tie)
        assert (*complexity(first), first.step_time_s) == pytest.approx(
            min((*complexity(price), price.step_time_s) for price in near)
        )
        assert len(simple) == 5 and len({str(price.layout) for price in simple}) == 5


def complexity(price):
    layout = price.layout
    sizes = (layout.tensor, layout.context, layout.pipeline, layout.data)
    return sum(size > 1 for size in sizes), layout.virtual


@pytest.mark.long
@pytest.mark.parametrize(
    ("ranks", "memory_bytes"),
    [
        (4, 0.05e9),
        pytest.param(8, 0.12e9, marks=pytest.mark.long),
        pytest.param(8, 0.3e9, marks=pytest.mark.long),
    ],
)
def test_a_long_sequence_is_cut_as_by_trying_all(monkeypatch, ranks, memory_bytes):
    """Every c that leaves each rank enough positions is tried, and the best layouts are found."""
    monkeypatch.setattr("ptdmpi.plan.search.space.LEAST_POSITIONS", 128)
    pricer = small("l=2,h=256,a=2,s=1024,V=2000", memory_bytes, 2, load_cluster("dgx-h100"))
    assert contexts(Space(ranks), pricer.model.config) == [1, 2, 4, 8]
    best: dict[str, float] = {}
    for price in everything(pricer, ranks, cuts=(1, 2, 4, 8)):
        if price.fits:
            sizes = str(price.layout)
            best[sizes] = min(price.step_time_s, best.get(sizes, math.inf))
    found = search(pricer, Space(ranks))
    assert [price.step_time_s for price in found] == pytest.approx(sorted(best.values())[:5])
    assert any(price.layout.context > 1 for price in found)
    near = {layout.context for layout in neighbours(found[0].layout, pricer)}
    assert near > {found[0].layout.context} and max(near) <= 8


def long(heads):
    """Prices of steps of two sequences of 65,536 positions on H100s, if no gather of keys overlaps
    with computation."""
    model = f"l=8,h={128 * heads},a={heads},s=65536,V=2000"
    cluster = load_cluster("dgx-h100")
    software = cluster.software.model_copy(update={"overlap_context": False})
    return small(model, 80e9, 2, cluster.model_copy(update={"software": software}))


def test_the_search_chooses_among_the_methods_that_can_serve_a_model():
    """If every query head has its own keys, dealt heads send less than gathered keys do. No context
    axis can deal 7 heads."""
    pricer = long(32)
    space = Space(8, zero=(1,), recompute="none", offload="none", sequence_parallel=True)
    chosen = search(pricer, space, 12)
    best = next(price.layout for price in chosen if price.layout.context > 2)
    assert best.exchange == "ulysses"
    same = (near for near in neighbours(best, pricer) if near.context == best.context)
    assert {near.context_method for near in same} == set(CONTEXT_METHODS)
    gathered = replace(best, context_method="all_gather")
    assert difference(gathered, best) == "--context-method ulysses"
    exchanges = {layout.exchange for layout in groups(Space(8), long(7))}
    assert exchanges == {"none", "all_gather", "ring"}
    asked = Space(8, context_method="ring")
    assert {layout.exchange for layout in groups(asked, pricer)} == {"none", "ring"}


def test_experts_are_dealt_if_their_state_does_not_fit_otherwise():
    """Eight data ranks that shard nothing would need 18 bytes for each of 47 billion parameters."""
    pricer = small("mixtral-8x7b", 320e9, 8, load_cluster("dgx-h100"))
    space = Space(8, zero=(0,), recompute="full", offload="none", data=(8,))
    best = search(pricer, space)[0].layout
    assert best.expert in (4, 8) and f"e={best.expert}" in str(best)
    with pytest.raises(InputError):
        search(pricer, replace(space, deals_experts=False))


def test_only_long_sequences_are_cut():
    def sizes(s, **changes):
        return contexts(Space(64, **changes), load_model(f"l=2,h=256,a=2,s={s}").config)

    assert sizes(8192) == sizes(16380) == sizes(2**20, cuts_sequences=False) == [1]
    assert sizes(16384) == [1, 2] and sizes(3 * 8192) == [1, 2, 3]
    assert sizes(131072) == [1, 2, 4, 8, 16]


@pytest.mark.parametrize("most", [8, pytest.param(220, marks=pytest.mark.long)])
def test_random_cases_are_found_as_by_trying_all(most):
    """Sizes, memory, machines, ranks and batches at random: each time the best of all layouts."""
    chosen, sharded, partly, cases = random.Random(1), 0, 0, 0
    while cases < most:
        layers, width = chosen.choice((2, 3, 4)), chosen.choice((256, 512, 1024))
        cluster = load_cluster(chosen.choice(("selene", "dgx-h100", "h200")))
        node = {"devices": chosen.choice((2, 4, 8)), "adapters": 2}
        cluster = cluster.model_copy(update={"node": cluster.node.model_copy(update=node)})
        memory, batch = 10 ** chosen.uniform(7.8, 10), chosen.choice((2, 4, 6, 8))
        pricer = small(f"l={layers},h={width},a=4,s=512,V=8000", memory, batch, cluster)
        ranks, overlap = chosen.choice((2, 3, 4, 6)), chosen.random() < 0.2
        mode = chosen.choice((*RECOMPUTE_MODES, *RECOMPUTE_MODES, None))
        modes = RECOMPUTE_MODES if mode is None else (mode,)
        best: dict[str, float] = {}
        for price in everything(pricer, ranks, overlap, modes, mode is None):
            if price.fits:
                sizes = str(price.layout)
                best[sizes] = min(price.step_time_s, best.get(sizes, math.inf))
        space = Space(ranks, recompute=mode, dp_overlap=overlap)
        if not best:
            with pytest.raises(InputError):
                search(pricer, space)
            continue
        found = search(pricer, space)
        times = [price.step_time_s for price in found]
        assert times == pytest.approx(sorted(best.values())[:5], rel=1e-12)  # sums are rounded
        partly += any(price.layout.recompute_layers is not None for price in found)
        sharded += any(price.layout.zero > 1 or price.layout.offload != "none" for price in found)
        cases += 1
    assert sharded > most / 11 and partly >= most // 70  # where memory is short


@pytest.mark.long
def test_uneven_layouts_are_found_as_by_trying_all():
    """Where memory is short, first stages with fewer layers, and in pipelines as few layers
    recomputed as fit (which are never among the best here): none is lost."""
    chosen, uneven = random.Random(5), 0
    for _ in range(40):
        layers, width = chosen.choice((3, 4, 5)), chosen.choice((512, 1024))
        cluster = load_cluster(chosen.choice(("selene", "dgx-h100")))
        memory, batch = 10 ** chosen.uniform(8.3, 9.6), chosen.choice((2, 4))
        pricer = small(f"l={layers},h={width},a=4,s=512,V=30000", memory, batch, cluster)
        ranks = chosen.choice((2, 3, 4))
        best: dict[str, float] = {}
        for layout in even(pricer, ranks):
            firsts = [None]
            if layout.pipeline > 1:
                own = len(pricer.memory.stages.split(layout)[0])
                firsts += range(max(1, own - 2), own)
            for one in (replace(layout, first_layers=first) for first in firsts):
                counts = [None]
                if one.recompute == "full" and not pricer.fits(replace(one, recompute="none")):
                    counts += range(1, layers)
                for two in (replace(one, recompute_layers=count) for count in counts):
                    if pricer.fits(two):
                        time_s = pricer.price(two).step_time_s
                        best[str(two)] = min(time_s, best.get(str(two), math.inf))
        space = Space(ranks, uneven=True, zero=(0,), offload="none")
        if not best:
            with pytest.raises(InputError):
                search(pricer, space)
            continue
        found = search(pricer, space)
        times = [price.step_time_s for price in found]
        assert times == pytest.approx(sorted(best.values())[:5], rel=1e-12)
        uneven += any(price.layout.first_layers is not None for price in found)
    assert uneven > 3


@pytest.mark.long
def test_gpipe_and_whole_messages_are_looked_at_too():
    """1F1B waits for a message behind every op, and small ones gain nothing by being scattered."""
    pricer = small("l=6,h=768,a=12", 80e9, 12)
    best, asked = (search(pricer, Space(8, kind))[0] for kind in (None, "interleaved"))
    assert best.layout.schedule == "gpipe" and best.step_time_s < asked.step_time_s
    h200 = load_cluster("h200")  # without a host that launches, or no message of these counts
    software = h200.software.model_copy(update={"launch_s": 0.0})
    pricer = small(MODELS[0], 80e9, 4, h200.model_copy(update={"software": software}))
    spaces = (Space(12, scatter_gather=on, zero=(0,)) for on in (None, True))
    best, asked = (search(pricer, space)[0] for space in spaces)
    assert not best.layout.scatter_gather and best.step_time_s < asked.step_time_s


def test_a_gpipe_layout_is_told_of_1f1b():
    pricer = small(MODELS[0], 0.8e9)
    price = pricer.price(Layout(1, 2, 1, schedule="gpipe"))
    assert not price.fits
    changes = [difference(price.layout, one) for one in neighbours(price.layout, pricer)]
    assert "--schedule 1f1b" in changes


@pytest.mark.parametrize(
    ("cluster", "dp_overlap"),
    [
        pytest.param("selene", False, marks=pytest.mark.long),
        pytest.param("dgx-h100", True, marks=pytest.mark.long),
    ],
)
def test_bounds_are_below_the_simulation(cluster, dp_overlap):
    # a short vocabulary: what the ends of the model send and compute leaves bounds little room
    pricer = small("l=7,h=512,a=8,V=512", 80e9, cluster=load_cluster(cluster))
    for price in everything(pricer, 12, dp_overlap):
        bound_s = pricer.bound_s(price.layout)
        assert pricer.rough_bound_s(price.layout) <= bound_s * (1 + 1e-9)
        assert bound_s <= price.step_time_s * (1 + 1e-9)


@pytest.mark.long
def test_bounds_hold_where_the_first_stage_has_few_layers():
    """The other ranks wait less for it than for an even one."""
    pricer = small("l=9,h=512,a=8,V=512", 80e9, 12)
    for layout in even(pricer, 4):
        if layout.pipeline > 1:
            for first in range(1, 9 - layout.stages + 2):
                one = replace(layout, first_layers=first)
                assert pricer.rough_bound_s(one) <= pricer.bound_s(one) * (1 + 1e-9), one


def test_what_is_given_is_kept():
    pricer = small(MODELS[0], 80e9)
    space = Space(8, "gpipe", "full", sequence_parallel=False, zero=(1,), dp_overlap=True)
    for price in search(pricer, space):
        layout = price.layout
        assert (layout.schedule, layout.recompute, layout.zero) == ("gpipe", "full", 1)
        assert layout.dp_overlap and not layout.sequence_parallel
        assert layout.ranks == 8


def test_activations_are_partitioned_where_that_is_asked_for_and_legal():
    pricer = small(MODELS[0], 80e9)
    for asked in (False, True):
        for layout in groups(Space(8, partition_activations=asked), pricer):
            shared = layout.recompute == "full" and layout.tensor > 1
            shared = shared and not layout.sequence_parallel
            assert layout.partition_activations == (asked and shared)
    tensor = pricer.price(Layout(2, 1, 1, recompute="full"))
    others = list(neighbours(tensor.layout, pricer))
    changes = [difference(tensor.layout, other) for other in others]
    assert "--partition-activations" in changes
    partitioned = others[changes.index("--partition-activations")]
    changes = [difference(partitioned, other) for other in neighbours(partitioned, pricer)]
    assert "recompute none, --no-partition-activations" in changes


def test_what_does_not_fit_says_what_would():
    """The parts of the least layout, and changes that make the search succeed."""
    words = r"fits on 8 ranks .* MiB per rank .*weights .*would fit: {}"
    pricer, space = small(MODELS[1], 0.45e9), Space(8, zero=(0,), offload="none")
    with pytest.raises(InputError, match=words.format(r"16 ranks \(")):
        search(pricer, space)
    assert search(pricer, replace(space, ranks=16))
    pricer = small("l=2,h=1024,a=2,s=256", 0.4e9)
    with pytest.raises(InputError, match=words.format("--zero 1")):
        search(pricer, space)
    assert search(pricer, replace(space, zero=(1,)))
    with pytest.raises(InputError, match="nor would one on 64 times as many"):
        search(small(MODELS[0], 1e3), space)


@pytest.mark.parametrize(("batch", "ranks", "near"), [(1, 13, "12 or 14"), (7, 5000, "392")])
def test_what_is_not_legal_names_the_nearest_numbers_of_ranks(batch, ranks, near):
    pricer = small(MODELS[0], 80e9, batch)
    with pytest.raises(InputError, match=f"is legal .*legal nearby: {near} ranks"):
        search(pricer, Space(ranks))
    for legal in map(int, near.split(" or ")):
        assert search(pricer, Space(legal))


def test_single_changes_make_a_layout_fit_or_faster():
    pricer = Pricer.of(SELENE, load_model("megatron-145b"), 64, "fp16")
    slow = pricer.price(Layout(8, 16, 1))
    at_once, changes = improvements(slow, pricer)
    assert at_once == 1 and changes
    assert all(other.fits and other.step_time_s < slow.step_time_s for other in changes)
    too_much = pricer.price(Layout(8, 16, 1, micro_size=4))
    assert not too_much.fits
    at_once, changes = improvements(too_much, pricer)
    assert changes and all(other.fits for other in changes)
    single = [pricer.price(layout) for layout in neighbours(too_much.layout, pricer)]
    best = min(other.step_time_s for other in single if other.fits)
    # a pair that costs less than the best single change is what is advised
    assert changes[0].step_time_s <= best and at_once == 2
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
        least = min(pricer.footprint(layout).total for layout in single)
        assert changes[0].memory.total == least
    assert bool(times) == (memory_bytes > 1e9)


def test_a_difference_names_what_is_other():
    layout = Layout(8, 16, 1)
    assert difference(layout, replace(layout, tensor=4, data=2)) == "t=4, d=2"
    other = replace(layout, recompute="full", sequence_parallel=True, scatter_gather=False, zero=1)
    words = "recompute full, --sequence-parallel, --no-scatter-gather, --zero 1"
    assert difference(layout, other) == words
    other = Layout(8, 4, 4, zero=3, shard_group=2, offload="optimizer")
    plain = Layout(8, 4, 4)
    assert difference(plain, other) == "--zero 3, --shard-group 2, --offload optimizer"
    assert difference(other, plain) == "--zero 0, --shard-group all, --offload none"


def test_the_papers_rules():
    """GPT-3 on 1024 GPUs: t = 8 in the node, p as small as fits."""
    pricer = Pricer.of(SELENE, load_model("gpt3-175b"), 1536, "fp16")
    price = heuristic(pricer, Space(1024))
    assert price.fits and price.layout.tensor == 8
    fewer = replace(price.layout, pipeline=price.layout.pipeline // 2, micro_size=1)
    fewer = replace(fewer, data=2 * price.layout.data)
    assert pricer.footprint(fewer).total > pricer.capacity_bytes
    times = microbatch_model(pricer, price.layout)
    per_replica = 1536 // price.layout.data
    stages = pricer.times.stage_seconds(replace(price.layout, micro_size=1), per_replica)
    slowest = max(forward.total + backward.total for forward, backward in stages)
    assert times[1] == pytest.approx((per_replica + price.layout.pipeline - 1) * slowest)


def test_the_papers_rules_where_no_tensor_axis_fills_a_node():
    """12 heads allow t = 4 on a node of 8, and p = 2 is then needed."""
    pricer = small("l=12,h=3072,a=12", 6e9, 16)
    layout = heuristic(pricer, Space(16)).layout
    assert layout.tensor == 4 and layout.pipeline > 1
