"""Sharding and offload in the configuration: what is refused, what is warned of, in which words."""

from dataclasses import replace

import pytest

from ptdmpi.config import InputError, Layout, resolve
from ptdmpi.config.legality import breaks, dear, shards_of_a_node
from ptdmpi.config.zero import STAGES, Sharing, covers_gradients, covers_state, covers_weights
from tests._configs import small, tree

SHARDED = {"parallel.zero": 3, "batch.global_size": 8, "batch.micro_size": 1}


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"parallel.zero": 4}, "parallel.zero = 4: Input should be less than or equal to 3"),
        (
            {"parallel.shard_group": 2},
            "parallel.shard_group = 2 has an effect only with parallel.zero = 1, 2 or",
        ),
        (
            {"parallel.shard_group": "node"},
            'parallel.shard_group = "node" has an effect only with parallel.zero = 1, 2 or 3; leg',
        ),
        (
            {**SHARDED, "parallel.shard_group": 3},
            "parallel.shard_group = 3 does not divide the data axis, 4; legal nearby: 1 or 2 or 4",
        ),
        (
            {
                "parallel.zero": 3,
                "parallel.context": 2,
                "batch.micro_size": 1,
                "parallel.shard_group": 3,
            },
            "parallel.shard_group = 3 does not divide c = 2, and is not c times a "
            "divisor of d = 2; legal nearby: 1 or 2 or 4",
        ),
        ({**SHARDED, "parallel.schedule": "zb-h1"}, "legal: zero = 0 or 1, or schedule = "),
        ({**SHARDED, "run.reproducible": True}, "legal: zero = 0 or 1"),
    ],
)
def test_sharding_that_makes_no_sense_is_refused(changes, line):
    with pytest.raises(InputError) as caught:
        resolve(tree(changes), 4)
    assert line in str(caught.value)


@pytest.mark.parametrize(
    ("tensor", "node_ranks", "group"),
    [(1, 2, 2), (1, 3, 2), (2, 2, 1), (1, 8, "all"), (2, 8, "all")],
)
def test_the_shards_of_a_node(tensor, node_ranks, group):
    """As many data ranks as stand on a node, and divide the axis; see below for others."""
    changes = {**SHARDED, "parallel.shard_group": "node", "parallel.tensor": tensor}
    config = resolve(tree(changes), 8 if tensor == 1 else 4 * tensor, node_ranks)
    assert config.parallel.shard_group == group
    assert resolve(tree(changes), 8).parallel.shard_group == "all"  # one node is taken to have all


@pytest.mark.parametrize(
    ("data", "near", "group"),
    [(6, 4, 2), (12, 8, 4), (12, 9, 3), (6, 8, 6), (8, 3, 2), (5, 4, 1), (4, 0, 1), (1, 1, 1)],
)
def test_groups_stay_inside_a_node_where_any_do(data, near, group):
    """Groups of 3 on nodes of 4 would have a rank of their second group on each of two nodes."""
    assert shards_of_a_node(data, near) == group


def test_many_microbatches_are_warned_of():
    layout = small({**SHARDED, "parallel.shard_group": 2}, 4).layout
    assert layout.shards == 2 and layout.sharding == "ZeRO 3 in 2 shards"
    (line,) = dear(layout, 8)
    assert line.startswith("warning: parallel.zero = 3 sums gradients 2 times a step")
    assert not list(dear(layout, 4)) and not list(dear(replace(layout, zero=1), 8))


def test_offload_is_said_too():
    changes = {**SHARDED, "parallel.offload": "disk"}
    assert small(changes, 2).layout.sharding == "ZeRO 3 in 2 shards, offload disk"
    assert small({"parallel.offload": "optimizer"}).layout.sharding == "offload optimizer"


@pytest.mark.parametrize(
    ("zero", "covered"),
    [
        (0, (False, False, False)),
        (1, (True, False, False)),
        (2, (True, True, False)),
        (3, (True, True, True)),
    ],
)
@pytest.mark.parametrize(("group", "ranks"), [(None, 4), (2, 2), (1, 1)])
def test_what_a_layout_shards(zero, covered, group, ranks):
    """State, gradients and weights by the stage of ZeRO; nothing in groups of one rank."""
    assert (covers_state(zero), covers_gradients(zero), covers_weights(zero)) == covered
    layout = Layout(1, 1, 4, zero=zero, shard_group=group)
    shards = [ranks if is_covered else 1 for is_covered in covered]
    sharded = [part > 1 for part in shards]
    assert [layout.shards_state, layout.shards_gradients, layout.shards_weights] == sharded
    for sharing in (layout.sharing, Sharing(zero, ranks)):
        assert [sharing.state_shards, sharing.gradient_shards, sharing.weight_shards] == shards
        assert [sharing.shards_state, sharing.shards_gradients, sharing.shards_weights] == sharded
    assert layout.shards == shards[0]
    assert zero in STAGES and not breaks(layout, "zero")
