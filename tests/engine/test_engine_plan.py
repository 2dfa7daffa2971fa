"""What the plan says of layers and parameters is what the engine builds."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ptdmpi.comm.world import World
from ptdmpi.plan.layout.stages import head_in_layers, split_layers
from ptdmpi.plan.schedule.orders import placement
from ptdmpi.plan.shape.flops import (
    hardware_flops,
    head_forward_flops,
    layer_forward_flops,
    model_flops,
)
from ptdmpi.plan.shape.parameters import parameter_count
from tests._configs import layout, small
from tests._engines import VOCAB_SIZE, build, whole_weights
from tests.parallel import parallel


def split(layers: int, pipeline: int, virtual: int, head: float) -> list[range]:
    return split_layers(layers, placement("interleaved", pipeline, virtual), head)


SHAPES = [
    {},
    {"model.tie_embeddings": False, "model.layers": 5},
    {"model.bias": False},
    {"model.kind": "llama", "model.ffn_hidden": 40},
    {"model.kind": "llama", "model.ffn_hidden": 40, "model.kv_heads": 2},
    {"model.kind": "llama", "model.ffn_hidden": 40, "model.bias": True},
    {"model.kind": "gpt", "model.activation": "swiglu", "model.positions": "rope"},
    {"model.kv_heads": 2, "model.norm": "rmsnorm"},
    {
        "model.kind": "llama",
        "model.expert_hidden": 16,
        "model.experts": 4,
        "model.experts_per_token": 2,
        "model.shared_experts": 1,
    },
    {
        "model.kind": "llama",
        "model.expert_hidden": 16,
        "model.experts": 4,
        "model.experts_per_token": 2,
        "model.dense_layers": 2,
    },
]


@parallel(ranks=[1, 4])
@pytest.mark.parametrize("shape", SHAPES)
def test_parameter_count_is_that_of_the_engine(comm, shape):
    where = {} if comm.size == 1 else layout(t=2, p=2)
    engine = build(World(comm), shape | where)
    whole = whole_weights(engine)
    count = sum(tensor.numel() for tensor in whole.values())
    assert parameter_count(engine.config.model, VOCAB_SIZE) == count


@parallel(ranks=[4])
@pytest.mark.parametrize(("layers", "first"), [(4, None), (5, None), (7, None), (7, 1)])
def test_stages_hold_the_layers_of_the_split(comm, layers, first):
    where = layout(p=2, v=2, d=2) | {"model.layers": layers}
    where |= {"parallel.first_layers": first} if first else {}
    engine = build(World(comm), where)
    held = {number: sorted(map(int, s.layers)) for number, s in engine.stages.items()}
    everyone = {k: v for of_rank in comm.allgather(held) for k, v in of_rank.items()}
    head = head_in_layers(engine.config.model, VOCAB_SIZE)
    expected = split_layers(layers, placement("interleaved", 2, 2), head, first)
    assert [everyone[k] for k in range(4)] == [list(part) for part in expected]


heads = st.floats(0.0, 6.0)
sizes = st.tuples(st.integers(1, 6), st.integers(1, 4), st.integers(0, 40), heads)


@given(sizes)
def test_every_layer_stands_once_and_no_stage_is_empty(case):
    pipeline, virtual, more, head = case
    layers = pipeline * virtual + more
    parts = split(layers, pipeline, virtual, head)
    assert len(parts) == pipeline * virtual
    assert list(itertools.chain.from_iterable(parts)) == list(range(layers))
    counts = [len(part) for part in parts]
    assert min(counts) >= 1
    if len(counts) > 1:  # only the last stage differs: it alone holds the head
        assert max(counts[:-1]) - min(counts[:-1]) <= 1


@given(sizes, st.integers(1, 12))
def test_the_first_stage_has_what_it_is_given(case, first):
    pipeline, virtual, more, head = case
    stages, layers = pipeline * virtual, pipeline * virtual + more
    if stages == 1:
        return
    first = min(first, 1 + more)
    for kind in ("interleaved", "zb-v"):
        if kind == "zb-v" and virtual != 2:
            continue
        parts = split_layers(layers, placement(kind, pipeline, virtual), head, first)
        assert list(itertools.chain.from_iterable(parts)) == list(range(layers))
        counts = [len(part) for part in parts]
        assert counts[0] == first and min(counts) >= 1
        assert stages == 2 or max(counts[1:-1]) - min(counts[1:-1]) <= 1


@pytest.mark.parametrize("pipeline", [2, 3, 4])
@pytest.mark.parametrize("head", [0.0, 0.3, 1.0, 2.5])
@pytest.mark.parametrize("layers", [6, 8, 11])
@pytest.mark.parametrize("first", [1, 2, 3])
def test_around_the_first_stage_the_slowest_rank_is_as_fast_as_can_be(
    pipeline, head, layers, first
):
    placed = placement("1f1b", pipeline, 1)
    counts = [len(part) for part in split_layers(layers, placed, head, first)]
    allowed = [s for s in all_splits(layers, pipeline) if s[0] == first]
    least = min(max(rank_works(s, pipeline, head)) for s in allowed)
    assert max(rank_works(counts, pipeline, head)) == pytest.approx(least)


def rank_works(counts, pipeline: int, head: float) -> list[float]:
    works = [*counts[:-1], counts[-1] + head]
    return [sum(works[rank::pipeline]) for rank in range(pipeline)]


def all_splits(layers: int, stages: int):
    for cuts in itertools.combinations(range(1, layers), stages - 1):
        edges = (0, *cuts, layers)
        yield tuple(b - a for a, b in itertools.pairwise(edges))


@pytest.mark.parametrize(("pipeline", "virtual"), [(2, 1), (3, 1), (4, 1), (2, 2), (3, 2), (1, 3)])
@pytest.mark.parametrize("head", [0.0, 0.3, 1.0, 2.5, 5.0])
@pytest.mark.parametrize("layers", [6, 7, 8, 11])
def test_the_slowest_rank_is_as_fast_as_can_be(pipeline, virtual, head, layers):
    """Over all splits whose stages but the last hold within one layer of each other (brute force);
    with one chunk per rank over all splits there are."""
    counts = [len(part) for part in split(layers, pipeline, virtual, head)]
    found = max(rank_works(counts, pipeline, head))
    allowed = [
        split
        for split in all_splits(layers, pipeline * virtual)
        if virtual == 1 or max(split[:-1]) - min(split[:-1]) <= 1
    ]
    assert found == pytest.approx(min(max(rank_works(s, pipeline, head)) for s in allowed))


@pytest.mark.parametrize(("pipeline", "virtual"), [(2, 1), (3, 1), (2, 2), (2, 3), (3, 2), (1, 3)])
@pytest.mark.parametrize("head", [0.0, 1 / 3, 1.0, 2.5, 40.0])
@pytest.mark.parametrize("layers", [6, 7, 8, 10, 11, 12])
def test_among_equally_fast_splits_the_stages_are_most_even(pipeline, virtual, head, layers):
    """In this order: the largest rank, the largest stage, the distance from the even split."""
    stages = pipeline * virtual

    def cost(counts) -> tuple[float, ...]:
        rank = max(rank_works(counts, pipeline, head))
        return rank, max(*counts[:-1], counts[-1] + head), abs(counts[-1] - layers / stages)

    found = cost([len(part) for part in split(layers, pipeline, virtual, head)])
    allowed = (s for s in all_splits(layers, stages) if max(s[:-1]) - min(s[:-1]) <= 1)
    assert found == pytest.approx(min(tuple(round(x, 9) for x in cost(s)) for s in allowed))


def test_rounding_does_not_make_stages_uneven():
    """3 + 1 1/3 is less than 2 + 2 1/3 in floating point."""
    assert [len(part) for part in split(8, 2, 2, 1 / 3)] == [2, 2, 2, 2]
    assert [len(part) for part in split(18, 3, 2, 1 / 3)] == [3] * 6


def test_an_even_split_stays_even():
    assert [len(part) for part in split(24, 4, 2, 0.0)] == [3] * 8
    assert sorted(len(part) for part in split(30, 4, 1, 0.0)) == [7, 7, 8, 8]
    assert split(7, 1, 1, 3.0) == [range(7)]


@pytest.mark.parametrize(("layers", "h"), [(24, 2304), (96, 12288)])
def test_flops_are_the_closed_forms(layers, h):
    """Narayanan et al. 2021, equation 3 (recomputed); Korthikanti et al. 2022, appendix A."""
    b, s, v = 512, 2048, 51200
    sizes = {"model.layers": layers, "model.hidden": h, "model.heads": 24, "model.seq_length": s}
    model = small(sizes).model
    expected = 72 * b * layers * s * h**2 * (1 + s / (6 * h) + v / (12 * layers * h))
    assert model_flops(model, v, b * s) == pytest.approx(expected, rel=1e-12)
    expected = 96 * b * layers * s * h**2 * (1 + s / (6 * h) + v / (16 * layers * h))
    assert hardware_flops(model, v, b * s, "full", layers=layers) == pytest.approx(
        expected, rel=1e-12
    )
    assert hardware_flops(model, v, b * s, "none", layers=layers) == model_flops(model, v, b * s)
    # scores, and what they weigh: 2 s^2 h each for a sequence and layer
    more = hardware_flops(model, v, b * s, "selective", layers=layers) - model_flops(
        model, v, b * s
    )
    assert more == pytest.approx(layers * b * 4 * s**2 * h, rel=1e-9)
    ratio = head_forward_flops(model, v) / layer_forward_flops(model)
    assert head_in_layers(model, v) == ratio


def test_gated_and_grouped_shapes_count_their_own_gemms():
    changes = {"model.kind": "llama", "model.hidden": 4096, "model.heads": 32, "model.kv_heads": 8}
    model = small(changes | {"model.ffn_hidden": 14336, "model.seq_length": 8192}).model
    gemms = 4096 * 4096 * 2 + 2 * 4096 * 1024 + 3 * 4096 * 14336
    assert layer_forward_flops(model) == 2 * gemms + 4 * 8192 * 4096
