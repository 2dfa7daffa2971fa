"""The nodes on which the experts of a token are, if the experts of a layer are distributed over
ranks."""

from collections.abc import Iterator
from typing import NamedTuple

from ptdmpi.base.words import counted
from ptdmpi.config import Layout, ModelConfig
from ptdmpi.plan.layout.grid import EXPERT_AXES, EXPERTS, layout_grid
from ptdmpi.plan.machine.cluster import TRAINER


class Reach(NamedTuple):
    """How far the experts of a token are from each other. `touched` is the largest number of nodes
    on which the experts of a token can be. `nodes` is the number of nodes over which the experts of
    a layer are distributed. The router chooses a token's experts from only some of the groups into
    which it divides the experts; `spread` is the largest number of nodes over which such a router
    group is distributed. If ranks differ in these numbers, all three are those of a rank with the
    largest `touched`."""

    touched: int
    nodes: int
    spread: int


def reach_of(model: ModelConfig, layout: Layout, devices: int) -> Reach:
    """Return the nodes of a token's experts, for nodes of `devices` ranks each. Consecutive ranks
    are on the same node."""
    grid = layout_grid(layout)
    # In every expert group, the rank numbers have the same offsets from the first rank of the
    # group. The nodes therefore depend only on the position (`place`) of this first rank in its
    # node.
    offsets = grid.members(0, EXPERTS)
    firsts = grid.group(0, *(axis for axis in grid.axes if axis not in EXPERT_AXES))
    return max(
        _reach(model, [(place + offset) // devices for offset in offsets])
        for place in {first % devices for first in firsts}
    )


def _reach(model: ModelConfig, nodes: list[int]) -> Reach:
    """Return the nodes of a token's experts, given the node of each rank of an expert group."""
    each, of_group = model.experts // len(nodes), model.experts // model.router_groups
    of_expert = [node for node in nodes for _ in range(each)]
    spreads = sorted(
        len(set(of_expert[first : first + of_group])) for first in range(0, model.experts, of_group)
    )
    most = sum(spreads[-model.router_top_groups :])
    every = len(set(nodes))
    return Reach(min(most, model.experts_per_token, every), every, spreads[-1])


def expert_lines(model: ModelConfig, layout: Layout, devices: int | None) -> Iterator[str]:
    """Yield lines for the user: where the experts of a layer are, and for how many tokens memory is
    predicted. `devices` is the number of ranks of a node, or None if it is unknown."""
    if not model.experts:
        return
    if layout.expert == 1:
        yield f"all {model.experts} of a layer on each rank"
        yield "memory is predicted for one expert that gets all tokens of a microbatch"
        return
    words = f"{model.experts // layout.expert} of {model.experts} on each of {layout.expert} ranks"
    if devices is None:
        yield f"{words}; on how many nodes is not known: set run.cluster"
    else:
        yield words + _where(model, reach_of(model, layout, devices))
    yield (
        f"memory is predicted for {TRAINER.fullest} times the mean number of tokens on a rank; a "
        "rank whose experts get more needs more"
    )


def _where(model: ModelConfig, reach: Reach) -> str:
    """Return the second half of the line for the user that says on how many nodes a token's experts
    are."""
    if reach.nodes == 1:
        return ", all on one node"
    words = f" on {reach.nodes} nodes; a token's experts are on at most {reach.touched} of them"
    if model.router_groups == 1:
        return words
    if reach.spread == 1:
        top = f"router_top_groups = {model.router_top_groups}"
        return f"{words} ({top}, and each router group is on one node)"
    groups = f"router_groups = {model.router_groups}"
    spread = counted(reach.spread, "node")
    return f"{words} (a router group is on up to {spread}; on one if nodes divide {groups})"
