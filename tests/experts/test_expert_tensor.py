"""Experts that the tensor axis does not divide: the training of one rank, in every layout."""

import re

import pytest

from ptdmpi.comm.world import World
from ptdmpi.config import InputError
from ptdmpi.config.layout import complete, parse
from ptdmpi.plan.layout.grid import EXPERT_AXES, layout_grid
from tests._configs import Changes, small
from tests._engines import build
from tests.experts.test_expert_parallel import BATCH, FULL, Row, check, dealt, go_on
from tests.experts.test_parity import GROUPED, MIXED
from tests.parallel import names, parallel

DIVIDED = {"parallel.sequence_parallel": True}
SEQUENCE = {"model.balance": "sequence", "model.balance_coefficient": 0.02}
MUON = {"optimizer.kind": "muon"}


def whole(e: int, c: int = 1, **sizes: int) -> dict[str, object]:
    """The changes of a layout with e and c, in which no expert is divided."""
    return {**dealt(e, c, **sizes), "parallel.expert_tensor": 1}


# name -> (ranks, shape, layout and how it is run)
ROWS: dict[str, Row] = {
    "t2": (2, MIXED | SEQUENCE, whole(1, t=2)),
    "t2 divided full": (2, GROUPED | SEQUENCE, whole(1, t=2) | DIVIDED | FULL),
    "t2 e2": (2, MIXED | BATCH, whole(2, t=2)),
    "t2 e2 divided": (2, MIXED | SEQUENCE, whole(2, t=2) | DIVIDED),
    "t2 e2 full": (2, GROUPED, whole(2, t=2) | FULL),
    "t2 d2 zero 3": (4, MIXED | BATCH, whole(1, t=2, d=2) | {"parallel.zero": 3}),
    "t2 e2 d2": (4, MIXED, whole(2, t=2, d=2)),
    "t2 e2 d2 zero 1": (4, MIXED | BATCH, whole(2, t=2, d=2) | {"parallel.zero": 1}),
    "t2 e2 d2 zero 2 divided": (
        4,
        MIXED | SEQUENCE,
        whole(2, t=2, d=2) | DIVIDED | {"parallel.zero": 2},
    ),
    "t2 e2 d2 zero 3 full": (4, MIXED, whole(2, t=2, d=2) | FULL | {"parallel.zero": 3}),
    "t2 e2 c2 zero 3 divided": (
        4,
        MIXED | BATCH,
        whole(2, 2, t=2) | DIVIDED | {"parallel.zero": 3},
    ),
    "t2 e4 c2": (4, MIXED | BATCH, whole(4, 2, t=2)),
    "t2 e4 c2 divided": (4, MIXED, whole(4, 2, t=2) | DIVIDED),
    "t2 e4 d2": (4, MIXED | SEQUENCE, whole(4, t=2, d=2)),
    "t2 e4 d2 divided selective": (
        4,
        GROUPED | BATCH,
        whole(4, t=2, d=2) | DIVIDED | {"recompute.mode": "selective"},
    ),
    "t4 e2": (4, GROUPED | SEQUENCE, whole(2, t=4)),
    "t4 e2 divided": (4, MIXED | BATCH, whole(2, t=4) | DIVIDED),
    "t2 p2 e2": (4, GROUPED | BATCH, whole(2, t=2, p=2)),
    "t2 p2 e2 zb-h1 divided": (
        4,
        MIXED | SEQUENCE,
        whole(2, t=2, p=2) | DIVIDED | {"parallel.schedule": "zb-h1"},
    ),
    "t2 p2 v2 e2 full": (4, GROUPED | {"model.layers": 4}, whole(2, t=2, p=2, v=2) | FULL),
    "t2 e2 d2 muon zero 1": (4, MIXED | MUON, whole(2, t=2, d=2) | {"parallel.zero": 1}),
    "t4 e2 muon": (4, MIXED | MUON, whole(2, t=4)),
}
SHORT = ("t2 divided full", "t2 e2", "t4 e2", "t2 e2 c2 zero 3 divided")


@pytest.mark.cases(2)
@parallel(ranks=[4])
@names(ROWS, short=SHORT)
def test_parity_with_one_rank(comm, name):
    check(comm, ROWS[name], 3)


@parallel(ranks=[4])
@pytest.mark.long
@pytest.mark.parametrize("name", ROWS)
def test_parity_after_twenty_steps(comm, name):
    check(comm, ROWS[name], 20)


@parallel(ranks=[4])
def test_a_tensor_rank_has_whole_experts(comm):
    engine = build(World(comm), MIXED | whole(2, t=4))
    entries = engine.buffer.entries
    numbers = {int(name.split(".")[4]) for name in entries if ".mlp.experts." in name}
    assert numbers == ({0, 1}, {2, 3})[comm.rank % 2]
    assert entries[f"layers.0.mlp.experts.{min(numbers)}.down.weight"].shape == (32, 16)
    assert [unit.apart for unit in engine.buffer.units] == [(), EXPERT_AXES]
    assert engine.axes["tensor"].rank == comm.rank and engine.axes["expert"].size == 2


# from and to: experts on other ranks, divided and not divided
MOVES = {
    "t2 to e2": (dealt(1, t=2), whole(2, t=2) | DIVIDED),
    "e2 to d2 zero 3": (whole(2, t=2), {**dealt(1, d=2), "parallel.zero": 3}),
}
WIDE_MOVES = {
    "t2 d2 e2 to t4 e2": (dealt(2, t=2, d=2), whole(2, t=4)),
    "t2 d2 e4 to t2 d2 zero 3": (
        whole(4, t=2, d=2),
        {**whole(1, t=2, d=2), "parallel.zero": 3},
    ),
}


@parallel(ranks=[2])
@pytest.mark.parametrize("name", MOVES)
def test_a_run_goes_on_with_divided_experts_and_without(comm, tmp_path, name):
    go_on(comm, tmp_path, MOVES[name])


@parallel(ranks=[4])
@pytest.mark.long
@pytest.mark.parametrize("name", WIDE_MOVES)
def test_a_run_goes_on_on_four_ranks(comm, tmp_path, name):
    go_on(comm, tmp_path, WIDE_MOVES[name])


WRONG: list[tuple[Changes, str]] = [
    ({"parallel.expert_tensor": 3}, 'expert_tensor = 3: .* legal: 1 or "all"'),
    (
        {"parallel.expert_tensor": 1, "model.experts": 0, "model.experts_per_token": 0},
        'expert_tensor = 1 is for experts, .* legal: expert_tensor = "all"',
    ),
    (
        whole(8, t=2, d=2),
        "8 does not divide t = 2, and is not t times a divisor of c = 1, or t c times a .* d = 2",
    ),
    (
        {"parallel.expert_tensor": 1, "model.seq_length": 15},
        "tensor = 2 does not divide the 15 positions of a sequence on a rank; .* tensor 1 or 3",
    ),
    (
        {"parallel.expert_tensor": 1, "log.tasks_every_steps": 2, "log.tasks": ["x.json"]},
        "expert_tensor = 1 excludes log.tasks_every_steps = 2; legal: 0, or",
    ),
    (
        whole(2, t=2, d=2) | {"parallel.zero": 1, "parallel.shard_group": 4},
        "shard_group = 4 does not divide the 2 ranks with the same experts",
    ),
]


@pytest.mark.parametrize(("changes", "line"), WRONG)
def test_one_line_says_what_is_wrong_and_what_is_legal(changes, line):
    shape = {**MIXED, "model.experts": 8, "parallel.tensor": 2}
    with pytest.raises(InputError) as caught:
        small(shape | changes, 4)
    assert [text for text in str(caught.value).splitlines() if re.search(line, text)]


def test_the_width_of_an_expert_need_not_be_divisible():
    changes = {**MIXED, "model.expert_hidden": 15, "parallel.tensor": 2}
    with pytest.raises(InputError, match=r"does not divide model\.expert_hidden = 15"):
        small(changes, 2)
    assert small(changes | {"parallel.expert_tensor": 1}, 2).layout.dealing.whole


def test_neighbours_have_different_experts_tensor_ranks_first():
    def members(text: str) -> list[tuple[int, ...]]:
        grid = layout_grid(complete(parse(text), 16))
        return [grid.members(5, name) for name in ("tensor", "tensor_slice", "expert", "shards")]

    tensor = (4, 5, 6, 7)
    assert members("t=4,e=2,et=1,p=1") == [tensor, (5, 7), (4, 5), (5,)]
    assert members("t=4,e=4,et=1,p=1") == [tensor, (5,), tensor, (5,)]
    assert members("t=4,e=8,et=1,p=1") == [tensor, (5,), tuple(range(8)), (5,)]
    assert members("t=2,e=8,et=1,c=2,p=1") == [(4, 5), (5,), tuple(range(8)), (5,)]
    assert members("t=4,e=2,p=1") == [tensor, tensor, (1, 5), (5,)]
    assert str(complete(parse("t=4,e=2,et=1"), 16)) == "t=4,e=2,et=1,p=1,d=4,v=1,b=1"
    assert str(complete(parse("t=4,e=2,et=4"), 16)) == "t=4,e=2,p=1,d=4,v=1,b=1"
