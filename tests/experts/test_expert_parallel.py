"""Experts dealt over ranks: the training of one rank, and where it can be, the bits of data
parallelism."""

from collections.abc import Callable

import pytest
import torch

from ptdmpi.comm.mpi import MpiCommunicator
from ptdmpi.comm.world import World
from ptdmpi.config import Layout
from ptdmpi.engine.engine import Engine
from ptdmpi.model.batch import Microbatch
from ptdmpi.model.experts.exchange import ExpertAxis
from ptdmpi.plan.layout.grid import EXPERT_AXES
from tests._configs import Changes, layout
from tests._engines import build, from_root, whole_weights
from tests.checkpoint.test_sharded import assert_whole, checkpoints, saved
from tests.context.test_parity import batches_of
from tests.experts.test_parity import GROUPED, MIXED
from tests.parallel import names, parallel

Curve = list[float]
Batches = Callable[[Engine, int], list[Microbatch]]


def dealt(e: int, c: int = 1, **sizes: int) -> dict[str, int]:
    """The changes of a layout with e and c."""
    return {**layout(**sizes), "parallel.expert": e, "parallel.context": c}


BATCH = {"model.balance": "batch", "model.balance_coefficient": 0.02, "model.z_loss_coefficient": 1}
FULL = {"recompute.mode": "full"}
# only layers 3 and 5 of six have experts, so some stages have none
SOME = GROUPED | {"model.layers": 6, "model.dense_layers": 2, "model.moe_every": 2}
SOME |= {"model.ffn_hidden": 48}
# shapes that three ranks divide
THREE = MIXED | {"model.experts": 6, "batch.global_size": 6, "model.seq_length": 18}
SIX = MIXED | {"model.experts": 6, "batch.global_size": 12}
FOUR_LAYERS = GROUPED | {"model.layers": 4}
DOCUMENTS = {"data.document_boundaries": True}
ULYSSES = {"parallel.context_method": "ulysses"}
RING = {"parallel.context_method": "ring"}
# name -> (ranks, shape, layout and how it is run)
Row = tuple[int, Changes, Changes]
ROWS: dict[str, Row] = {
    "e2 d2": (2, MIXED, dealt(2, d=2)),
    "e2 d2 grouped batch full": (2, GROUPED | BATCH, dealt(2, d=2) | FULL),
    "e2 c2": (2, MIXED, dealt(2, c=2)),
    "e3 d3": (3, THREE, dealt(3, d=3)),
    "e3 c3": (3, THREE, dealt(3, c=3)),
    "e4 d4 selective": (4, GROUPED, dealt(4, d=4) | {"recompute.mode": "selective"}),
    "e2 d4": (4, MIXED, dealt(2, d=4)),
    "e4 c2 d2": (4, MIXED, dealt(4, c=2, d=2)),
    "e2 c2 d2 zero 3": (4, MIXED, dealt(2, c=2, d=2) | {"parallel.zero": 3}),
    "e2 c4 zero 2": (4, MIXED, dealt(2, c=4) | {"parallel.zero": 2}),
    "e2 d4 zero 1": (4, MIXED, dealt(2, d=4) | {"parallel.zero": 1}),
    "e2 d4 zero 2": (4, MIXED, dealt(2, d=4) | {"parallel.zero": 2}),
    "e2 d4 zero 3 full": (4, MIXED, dealt(2, d=4) | FULL | {"parallel.zero": 3}),
    "e2 t2 d2 divided": (4, MIXED, dealt(2, t=2, d=2) | {"parallel.sequence_parallel": True}),
    "e2 p2 d2": (4, GROUPED, dealt(2, p=2, d=2)),
    "e2 p2 d2 zb-h1": (4, MIXED, dealt(2, p=2, d=2) | {"parallel.schedule": "zb-h1"}),
    "e2 p2 v2 d2 full": (4, FOUR_LAYERS, dealt(2, p=2, v=2, d=2) | FULL),
    "e2 p2 d2 gpipe": (4, GROUPED, dealt(2, p=2, d=2) | {"parallel.schedule": "gpipe"}),
    "e2 p2 v2 d2 zb-v": (
        4,
        FOUR_LAYERS,
        dealt(2, p=2, v=2, d=2) | {"parallel.schedule": "zb-v"},
    ),
    "e4 c2 d2 documents": (4, MIXED | DOCUMENTS, dealt(4, c=2, d=2)),
    "e2 c2 ulysses documents": (2, MIXED | DOCUMENTS, dealt(2, c=2) | ULYSSES),
    "e4 c4 ring": (4, MIXED, dealt(4, c=4) | RING),
    "e2 c2 d2 ring zero 3": (
        4,
        MIXED | DOCUMENTS,
        dealt(2, c=2, d=2) | RING | {"parallel.zero": 3},
    ),
    "e2 d2 p2 muon": (4, MIXED | {"optimizer.kind": "muon"}, dealt(2, p=2, d=2)),
    "e2 d4 muon zero 1": (
        4,
        MIXED | {"optimizer.kind": "muon"},
        dealt(2, d=4) | {"parallel.zero": 1},
    ),
    "olmoe p2 c2": (
        4,
        MIXED | {"model.qk_norm": "all", "model.router_normalize": False},
        dealt(1, c=2, p=2),
    ),
    "some t2 p2 v2": (4, SOME, dealt(1, t=2, p=2, v=2)),
    "some e2 p2 v2 d2 batch full": (4, SOME | BATCH, dealt(2, p=2, v=2, d=2) | FULL),
    "some e2 d4 zero 3": (4, SOME, dealt(2, d=4) | {"parallel.zero": 3}),
    "some p2 v2 d2 zero 3": (4, SOME, dealt(1, p=2, v=2, d=2) | {"parallel.zero": 3}),
    "some p2 v2 zb-v": (2, SOME, dealt(1, p=2, v=2) | {"parallel.schedule": "zb-v"}),
    "some p2 d2 muon zero 1": (
        4,
        SOME | {"optimizer.kind": "muon"},
        dealt(1, p=2, d=2) | {"parallel.zero": 1},
    ),
    "e3 p2 d3": (6, THREE, dealt(3, p=2, d=3)),
    "e3 d6 zero 3": (6, SIX, dealt(3, d=6) | {"parallel.zero": 3}),
    "e4 p2 v2 d4": (8, FOUR_LAYERS, dealt(4, p=2, v=2, d=4)),
    "e4 t2 d4": (8, GROUPED, dealt(4, t=2, d=4)),
    "e4 d8 zero 3": (8, MIXED | {"batch.global_size": 16}, dealt(4, d=8) | {"parallel.zero": 3}),
    "some e2 t2 p2 v2 d2": (8, SOME, dealt(2, t=2, p=2, v=2, d=2)),
    "some e2 p2 v2 d4 zero 3": (8, SOME, dealt(2, p=2, v=2, d=4) | {"parallel.zero": 3}),
}
WIDE = tuple(name for name, (ranks, _, _) in ROWS.items() if ranks > 4)
SHORT = (
    "some e2 p2 v2 d2 batch full",
    "e2 d2 grouped batch full",
    "e2 c2",
    "e2 d4 zero 3 full",
    "e2 t2 d2 divided",
)


def trained(
    engine: Engine, first: int, last: int, batches: Batches = batches_of
) -> tuple[Curve, list[torch.Tensor]]:
    """Losses (in all, and each by name with its count) and norms of some steps, and the loads of
    the experts."""
    results = [engine.step(k, batches(engine, k)) for k in range(first, last)]
    curve = []
    for result in results:
        curve += [result.loss, result.grad_norm]
        curve += [value for loss in result.losses.values() for value in (loss.mean, loss.count)]
    return curve, [result.loads.tokens for result in results if result.loads is not None]


def check(comm, row: Row, steps: int, batches: Batches = batches_of) -> None:
    """A row's training equals that of one rank: losses, norms, loads, validation and weights."""
    ranks, shape, where = row
    part, alone = World(comm).first(ranks), World(comm).first(1)
    if part is not None:
        engine = build(part, {**shape, **where})
        curve, loads = trained(engine, 0, steps, batches)
        validated = engine.evaluate(batches(engine, steps))["task"].mean
        found = whole_weights(engine)
    if alone is not None:
        serial = build(alone, shape)
        expected, all_loads = trained(serial, 0, steps, batches)
        assert curve == pytest.approx(expected, rel=1e-12)
        assert len(loads) == len(all_loads) == steps * (serial.config.model.experts > 0)
        assert all(map(torch.equal, loads, all_loads))
        mean = serial.evaluate(batches(serial, steps))["task"].mean
        assert validated == pytest.approx(mean, rel=1e-12)
        whole = whole_weights(serial)
        assert found.keys() == whole.keys()
        for key, values in whole.items():
            assert (found[key] - values).abs().max() <= 1e-12 * values.abs().max(), key
    from_root(comm, None)


@pytest.mark.cases(2)
@parallel(ranks=[4])
@names([name for name in ROWS if name not in WIDE], short=SHORT)
def test_parity_with_one_rank(comm, name):
    check(comm, ROWS[name], 3)


@parallel(ranks=[8], limit_s=180.0)
@pytest.mark.long
@pytest.mark.parametrize("name", WIDE)
def test_parity_of_eight_ranks(comm, name):
    check(comm, ROWS[name], 3)


@parallel(ranks=[4])
@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in ROWS if name not in WIDE])
def test_parity_after_twenty_steps(comm, name):
    check(comm, ROWS[name], 20)


@parallel(ranks=[8], limit_s=300.0)
@pytest.mark.long
@pytest.mark.parametrize("name", WIDE)
def test_parity_of_eight_ranks_after_twenty_steps(comm, name):
    check(comm, ROWS[name], 20)


LONG_TYPES = [pytest.param(name, marks=pytest.mark.long) for name in ("bf16", "fp32")]


@parallel(ranks=[3])
@pytest.mark.parametrize("precision", ["fp64", *LONG_TYPES])
def test_one_microbatch_a_rank_has_the_bits_of_data_parallelism(comm, precision):
    """Three ranks, because a sum of two has the same bits in both orders; and fp64, because there a
    kernel that also adds its product to the sum gives other bits, even for few rows."""
    same_bits(comm, THREE | {"precision.compute": precision}, dealt(3, d=3))


# layouts of four ranks in which the experts are dealt over several axes, or their widths divided
FOLDED = {"e4 c2 d2": dealt(4, c=2, d=2), "e2 t2 d2": dealt(2, t=2, d=2)}


@parallel(ranks=[4])
@pytest.mark.long
@pytest.mark.parametrize("precision", ["fp64", "bf16", "fp32"])
@pytest.mark.parametrize("name", FOLDED)
def test_folded_experts_have_the_bits_of_experts_that_are_not_dealt(comm, name, precision):
    more = {"precision.compute": precision, "batch.micro_size": 4}
    same_bits(comm, MIXED | more, FOLDED[name])


def same_bits(comm, shape: Changes, where: Changes) -> None:
    """Training with dealt experts has the bits of training with all experts on every rank."""
    runs = []
    for e in (where["parallel.expert"], 1):
        engine = build(World(comm), {**shape, **where, "parallel.expert": e})
        assert engine.config.microbatches == 1
        curve, loads = trained(engine, 0, 3)
        runs.append((curve, loads, whole_weights(engine)))
    (found, loads, weights), (expected, all_loads, whole) = runs
    assert found == expected
    assert all(map(torch.equal, loads, all_loads))
    assert weights.keys() == whole.keys()
    for key, values in whole.items():
        assert torch.equal(weights[key], values), key


@parallel(ranks=[2])
def test_an_expert_computes_the_tokens_of_all_ranks_in_their_order(comm):
    """Rank 0 sends tokens to expert 2 first, rank 1 to both of the other rank's or own experts."""
    chosen = torch.tensor([[[2, 0], [2, 3], [3, 0]], [[3, 1], [0, 2], [2, 3]]][comm.rank])
    together = ExpertAxis(MpiCommunicator(comm)).dispatch(chosen, 4)
    held = [(expert, rows.tolist()) for expert, rows, _ in together.held]
    # rows arrive by source rank, then by expert, then by token: two ranks' rows of two experts
    assert held == [[(0, [0, 1, 2]), (1, [3])], [(0, [0, 1, 4, 5]), (1, [2, 3, 6, 7])]][comm.rank]
    apart = ExpertAxis(MpiCommunicator(comm), by_source=True).dispatch(chosen, 4)
    held = [(expert, rows.tolist()) for expert, rows, _ in apart.held]
    of_second = [(0, [0, 1]), (1, [2, 3]), (0, [4, 5]), (1, [6, 7])]
    assert held == [[(0, [0, 1]), (0, [2]), (1, [3])], of_second][comm.rank]


@pytest.mark.parametrize(
    ("layout", "microbatches", "by_source"),
    [
        (Layout(1, 1, 4, expert=4), 1, True),
        (Layout(2, 1, 2, context=2, expert=4), 1, True),
        (Layout(1, 1, 4, expert=4), 2, False),
        (Layout(1, 1, 4, expert=2), 1, False),
        (Layout(2, 1, 2, expert=4, expert_tensor=1), 1, False),
        (Layout(1, 1, 1), 1, False),
    ],
)
def test_ranks_are_computed_separately_only_where_bits_are_promised(
    layout, microbatches, by_source
):
    assert layout.computes_by_source(microbatches) is by_source


@parallel(ranks=[2])
def test_a_rank_has_its_own_experts_alone(comm):
    engine = build(World(comm), {**MIXED, **dealt(2, d=2)})
    numbers = {int(name.split(".")[4]) for name in engine.buffer.entries if ".mlp.experts." in name}
    assert numbers == ({0, 1}, {2, 3})[comm.rank]
    assert [unit.apart for unit in engine.buffer.units] == [(), EXPERT_AXES]


# from and to: any e, and shards of other ranks
MOVES = {
    "e2 to t2": (dealt(2, d=2), layout(t=2)),
    "d2 zero 3 to e2": ({**layout(d=2), "parallel.zero": 3}, dealt(2, d=2)),
}
WIDE_MOVES = {
    "e4 to e2 zero 1": (dealt(4, d=4), {**dealt(2, d=4), "parallel.zero": 1}),
    "e2 zero 3 to e4 of c2": ({**dealt(2, d=4), "parallel.zero": 3}, dealt(4, c=2, d=2)),
    "t2 e2 to p2 e2": (dealt(2, t=2, d=2), dealt(2, p=2, d=2)),
}


def go_on(comm, tmp_path, way: tuple[Changes, Changes]) -> None:
    """A run that was saved in one layout goes on in the other like a run on one rank."""
    settings = {**MIXED, "model.balance": "batch", "model.balance_coefficient": 0.02}
    alone = World(comm).first(1)
    straight = trained(build(alone, settings), 0, 4)[0] if alone is not None else None
    world = World(comm)
    first = build(world, {**settings, **way[0]})
    found = trained(first, 0, 2)[0]
    assert_whole(world, saved(first, tmp_path, 2))
    second = build(world, {**settings, **way[1]})
    progress, _ = checkpoints(second, tmp_path).resume("auto")
    assert progress is not None and progress.step == 2
    found += trained(second, 2, 4)[0]
    assert found == pytest.approx(from_root(comm, straight), rel=1e-12)


@pytest.mark.cases(1)
@parallel(ranks=[2])
@pytest.mark.parametrize("name", MOVES)
def test_a_run_goes_on_with_other_experts_on_a_rank(comm, tmp_path, name):
    go_on(comm, tmp_path, MOVES[name])


@parallel(ranks=[4])
@pytest.mark.long
@pytest.mark.parametrize("name", WIDE_MOVES)
def test_a_run_goes_on_with_other_experts_on_four_ranks(comm, tmp_path, name):
    go_on(comm, tmp_path, WIDE_MOVES[name])
