"""Stages of layers with unequal work: no other cut has a smaller largest stage."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ptdmpi.plan.layout.stages import split_model
from ptdmpi.plan.layout.unlike import split_unlike
from ptdmpi.plan.schedule.orders import placement
from ptdmpi.plan.shape import flops
from tests._configs import small


def loads(works, placed, head, ranges):
    """The work of each stage, and of each rank."""
    stages = [sum(works[layer] for layer in own) for own in ranges]
    stages[-1] += head
    ranks = [sum(stages[s] for s in placed.stages_of(r)) for r in range(placed.pipeline)]
    return stages, ranks


def cuts(layers, stages, first):
    """Every way to cut the layers into stages."""
    for ends in itertools.combinations(range(1, layers), stages - 1):
        ranges = [range(a, b) for a, b in itertools.pairwise((0, *ends, layers))]
        if first is None or len(ranges[0]) == first:
            yield ranges


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    works=st.lists(st.sampled_from([1.0, 2.5, 7.0]), min_size=4, max_size=9),
    pipeline=st.integers(2, 3),
    virtual=st.integers(1, 2),
    head=st.sampled_from([0.0, 0.7, 4.0]),
    first=st.sampled_from([None, 1, 2]),
)
def test_the_largest_stage_is_as_small_as_it_can_be(works, pipeline, virtual, head, first):
    if pipeline * virtual + (first or 1) - 1 > len(works):
        return
    schedule = "interleaved" if virtual > 1 else "1f1b"
    placed = placement(schedule, pipeline, virtual)
    ranges = split_unlike(tuple(works), placed, head, first)
    assert [layer for own in ranges for layer in own] == [*range(len(works))]
    assert len(ranges) == placed.stages and all(ranges)
    assert first is None or len(ranges[0]) == first
    stages, ranks = loads(works, placed, head, ranges)
    every = [loads(works, placed, head, other) for other in cuts(len(works), len(ranges), first)]
    if virtual == 1:
        own = stages if first is None else stages[1:]
        least = min(max(s if first is None else s[1:]) for s, _ in every)
        assert max(own) == pytest.approx(least)
    else:
        assert max(ranks) <= min(max(r) for _, r in every) + max(works)


def test_a_model_is_cut_by_the_work_of_its_layers():
    """Five dense layers that are four times as wide as two experts, and five layers with experts:
    the second stage has more layers."""
    changes = {"model.kind": "llama", "model.layers": 10, "model.ffn_hidden": 512}
    changes |= {"model.experts": 4, "model.experts_per_token": 2, "model.expert_hidden": 64}
    model = small(changes | {"model.dense_layers": 5}).model
    placed = placement("1f1b", 2, 1)
    first, second = split_model(model, 53, placed)
    assert len(first) < len(second)
    works = [flops.layer_forward_flops(model, layer) for layer in range(10)]
    assert works[0] == works[4] > 2 * works[5] == 2 * works[9]
    head = flops.head_forward_flops(model, 53)
    stages, _ = loads(works, placed, head, [first, second])
    assert max(stages) == min(
        max(loads(works, placed, head, other)[0]) for other in cuts(10, 2, None)
    )
