"""The nodes on which the experts of a token are."""

import re

import pytest
import torch

from ptdmpi.config import Layout
from ptdmpi.config.layout import complete, parse
from ptdmpi.model.experts.routing import Routing
from ptdmpi.plan.layout.grid import layout_grid
from ptdmpi.plan.layout.reach import Reach, expert_lines, reach_of
from ptdmpi.plan.machine.cluster import load_model

V3 = load_model("deepseek-v3").config  # 256 experts in 8 groups; 8 of 4 groups for a token
FREE = V3.model_copy(update={"router_groups": 1, "router_top_groups": 1})
# layout, ranks of a node -> nodes of a token at most, nodes in all, nodes of a router group
CASES = {
    ("t=1,e=64,p=1,d=64", 8): Reach(4, 8, 1),
    ("t=1,e=32,p=1,d=64", 8): Reach(4, 4, 1),
    ("t=1,e=64,p=1,d=64", 4): Reach(8, 16, 2),
    ("t=2,e=64,p=1,d=64", 8): Reach(8, 16, 2),
    ("t=8,e=64,et=1,p=1,d=8", 8): Reach(4, 8, 1),
    ("t=2,c=4,e=64,et=1,p=2,d=8", 8): Reach(4, 8, 1),
    ("t=1,e=8,p=1,d=64", 8): Reach(1, 1, 1),
    # three of the eight pairs of ranks are on two nodes
    ("t=1,e=16,p=1,d=48", 3): Reach(6, 6, 2),
}


def where(text: str) -> Layout:
    return complete(parse(text), None)


@pytest.mark.parametrize(("text", "devices"), CASES)
def test_nodes_of_a_token_are_those_of_its_groups(text, devices):
    assert reach_of(V3, where(text), devices) == CASES[text, devices]
    without = reach_of(FREE, where(text), devices)
    assert without.touched == min(8, without.nodes), "only the experts of a token limit it"


def nodes_of(chosen: torch.Tensor, text: str, devices: int) -> torch.Tensor:
    """The nodes [T, k] of the experts of each token that rank 0 sends."""
    members = torch.tensor(layout_grid(where(text)).members(0, "expert"))
    return members[chosen // (V3.experts // len(members))] // devices


@pytest.mark.parametrize(("text", "devices"), CASES)
def test_no_token_is_sent_to_more_nodes(text, devices):
    scores = torch.rand(1024, V3.experts, generator=torch.Generator().manual_seed(1))
    nodes = nodes_of(Routing(V3).choose(scores), text, devices)
    most = max(len(row.unique()) for row in nodes)
    reach = reach_of(V3, where(text), devices)
    assert most <= reach.touched
    if reach.spread == 1:
        assert most == reach.touched


def test_the_limit_does_not_change_how_many_rows_cross_nodes():
    """A token is sent once for each expert; so the planner's all-to-all has no term for it."""
    text, devices = "t=1,e=64,p=1,d=64", 8
    scores = torch.rand(2**12, V3.experts, generator=torch.Generator().manual_seed(1))
    limited, free = (
        (nodes_of(Routing(model).choose(scores), text, devices) > 0).double().mean().item()
        for model in (V3, FREE)
    )
    assert limited == pytest.approx(7 / 8, abs=0.02)
    assert free == pytest.approx(7 / 8, abs=0.02)


LINES = [
    (V3, "t=1,e=64,p=1,d=64", 8, "4 of 256 on each of 64 ranks on 8 nodes; .* at most 4 of them "),
    (V3, "t=1,e=64,p=1,d=64", 8, "router_top_groups = 4, and each router group is on one node"),
    (V3, "t=2,e=64,p=1,d=64", 8, "a router group is on up to 2 nodes; on one if .* = 8"),
    (FREE, "t=1,e=64,p=1,d=64", 8, "on at most 8 of them\n"),
    (V3, "t=1,e=8,p=1,d=64", 8, "32 of 256 on each of 8 ranks, all on one node"),
    (V3, "t=1,e=8,p=1,d=64", None, "on how many nodes is not known: set run.cluster"),
    (V3, "t=1,e=8,p=1,d=64", None, "\nmemory .* 2 times the mean number of tokens on a rank"),
    (V3, "t=1,p=1,d=64", 8, "all 256 .*\nmemory .* one expert that gets all tokens"),
    (load_model("gpt3-125m").config, "t=1,p=1,d=8", 8, "^$"),
]


@pytest.mark.parametrize(("model", "text", "devices", "line"), LINES)
def test_lines_for_the_user(model, text, devices, line):
    lines = "\n".join(expert_lines(model, where(text), devices))
    assert re.search(line, lines), lines
