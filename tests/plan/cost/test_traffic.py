"""Closed forms of a step's traffic, by hand; that they are the engine's: tests/engine."""

from dataclasses import replace

import pytest

from ptdmpi.config import Layout
from ptdmpi.plan.cost.held import HeldParts
from ptdmpi.plan.cost.traffic import StepTraffic
from ptdmpi.plan.cost.tree import nodes_of
from ptdmpi.plan.machine.cluster import Model
from tests._configs import layout, small

MODEL = Model("small", small({"model.tie_embeddings": False}).model, 128)
S = 16 * 2 * 32  # s b h


def sent(layout: Layout, precision: str = "fp32", rank: int = 0, batch: int = 16) -> dict:
    return StepTraffic(MODEL, layout, batch, precision).of(rank).sent_bytes


NORM = [32, 32]
LAYER = [*NORM, 32 * 96, 96, 32 * 32, 32, *NORM, 32 * 128, 128, 128 * 32, 32]
EMBEDDING, HEAD = [128 * 32, 16 * 32], [*NORM, 128 * 32]


def flat(*sizes: int) -> int:
    """Elements of parameters, each taken up to a multiple of 256."""
    return sum(-(-size // 256) * 256 for size in sizes)


def unit(*sizes: int, shards: int) -> int:
    """Elements of parameters that are cut into equal shards of multiples of 256."""
    return -(-flat(*sizes) // (256 * shards)) * 256 * shards


ALL = [*LAYER * 3, *EMBEDDING, *HEAD]


def test_volumes_of_zero():
    """Rajbhandari et al. 2020, section 7: 2 psi, 2 psi, 2 psi and 3 psi at one microbatch in the
    limit of many ranks and layers; of so many microbatches ZeRO 2 and 3 scatter and gather that
    often. A backward gathers all but the head, which is there from the forward, and the embedding,
    which is only looked up; the next forward finds the first layer. With shards come the norms of
    rows of 256 elements."""
    layouts = [Layout(1, 1, 4, micro_size=4, zero=zero) for zero in range(4)]
    together = unit(*ALL, shards=4)
    layer = unit(*LAYER, shards=4)
    ends = unit(*EMBEDDING, shards=4) + unit(*HEAD, shards=4)
    apart = 3 * layer + ends
    assert [sum(sent(one)["data"].values()) for one in layouts] == [
        2 * 3 * flat(*ALL),  # 4 bytes, 3/4 of them
        2 * 3 * together + 3 * together // 256,
        2 * 3 * apart + 3 * apart // 256,
        3 * (2 * apart + 3 * layer) + 3 * apart // 256,
    ]
    two, three = (sent(replace(one, micro_size=1))["data"] for one in layouts[2:])
    rows, gathered = 3 * apart // 256, 4 * ends + (6 + 3 * 5) * layer
    assert two == {"reduce_scatter": 4 * 3 * apart, "all_gather": 3 * apart + rows}
    assert three == {"reduce_scatter": 4 * 3 * apart, "all_gather": 3 * gathered + rows}


def test_weights_travel_in_the_compute_type_and_gradients_in_float32():
    layout, whole = Layout(1, 1, 2, micro_size=8), unit(*ALL, shards=2)
    assert sent(layout, "bf16")["data"] == {"all_reduce": 4 * flat(*ALL)}
    assert sent(replace(layout, zero=1), "bf16")["data"] == {
        "reduce_scatter": 2 * whole,
        "all_gather": whole + 2 * whole // 256,
    }
    assert sent(layout, "fp64")["data"] == {"all_reduce": 8 * flat(*ALL)}


def test_groups_of_shards_and_their_copies():
    """Two groups of two: each rank's half of the gradients is summed over both."""
    whole = unit(*ALL, shards=2)
    found = sent(Layout(1, 1, 4, micro_size=4, zero=1, shard_group=2))
    assert found["shard"]["reduce_scatter"] == 2 * whole
    assert found["replicate"] == {"all_reduce": 2 * whole}


def test_activations_over_the_tensor_axis():
    """Over two ranks a sum sends its bytes once: four per layer, the embedding's and the head's, in
    each of eight microbatches; three numbers per token; the squares of 41 norms."""
    layout, m = Layout(2, 1, 1, micro_size=2), 8
    rest = m * 3 * 16 * 2 * 4 + 41 * 4
    assert sent(layout)["tensor"] == {"all_reduce": m * (3 * 4 + 2) * S * 4 + rest}
    full = replace(layout, recompute="full")
    assert sent(full)["tensor"] == {"all_reduce": m * (3 * 6 + 2) * S * 4 + rest}
    divided = sent(replace(layout, sequence_parallel=True))["tensor"]
    assert divided["reduce_scatter"] == m * (3 * 4 + 2) * S * 4 // 2
    assert divided["all_gather"] == m * (3 * 6 + 3) * S * 4 // 2


def test_activations_between_stages():
    """Forwards from the first rank and gradients from the last, whole or, of a tensor group, a
    share of each; the middle one sends both."""
    layout = Layout(1, 3, 1, micro_size=2)
    one = 8 * S * 4
    assert [sent(layout, rank=rank)["pipeline"]["send"] for rank in range(3)] == [one, 2 * one, one]
    shared = replace(layout, tensor=2)
    assert sent(shared)["pipeline"]["send"] == one // 2
    assert sent(replace(shared, scatter_gather=False))["pipeline"]["send"] == one
    assert sent(shared)["tensor"]["all_gather"] == one // 2


@pytest.mark.parametrize(
    ("leaves", "first", "end", "nodes"),
    [
        (8, 0, 4, 1),
        (8, 4, 8, 1),
        (6, 0, 3, 2),
        (6, 3, 6, 2),
        (3, 2, 3, 1),
        (5, 4, 5, 1),
        (1, 0, 1, 1),
    ],
)
def test_nodes_of_the_tree(leaves, first, end, nodes):
    assert nodes_of(leaves, first, end) == nodes


def test_a_frozen_tied_table_is_one_unit_and_has_no_second_gradient():
    """Both uses name it, and it is counted once; one that trains has a gradient for each use."""
    for changes, units in (({"adapt.method": "lora"}, ["frozen tied"]), ({}, ["tied", "second"])):
        config = small(changes | layout(d=2) | {"parallel.zero": 3}, 2)
        held = HeldParts(Model("m", config.model, 101), config.layout)
        found, uses = held.units(0, True, 2, trains=not changes)
        tables = [unit for unit in found if "tied" in unit or unit == "second"]
        assert tables == units
        assert [found[unit] for unit in tables] == [-(-101 * 32 // 512) * 512] * len(units)
        assert units[0] in uses["embedding"] and units[0] in uses["head"]
