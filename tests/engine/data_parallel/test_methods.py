"""Every data-parallel method, whoever wrote it: the same bits in every p, v and schedule, over t to
rounding, the same bits when resumed, and memory as it is counted.

A method joins by its name in `METHODS`; `SETTINGS` has what a configuration must say besides.
"""

from typing import Any

import pytest
import torch

from benchmarks.planning.allocated import measured
from ptdmpi.checkpoint.save import Checkpoints
from ptdmpi.comm.wires import wire_named
from ptdmpi.comm.world import World
from ptdmpi.config.methods import DIFFERING, stored_numbers
from ptdmpi.engine.data_parallel import METHODS
from ptdmpi.engine.engine import Engine
from ptdmpi.plan.cost.memory import MemoryModel
from ptdmpi.plan.layout.grid import grid_of
from ptdmpi.plan.layout.run_method import RunMethod
from ptdmpi.plan.shape.parameters import parameter_count
from tests._configs import layout, small
from tests._engines import VOCAB_SIZE, build, course, microbatches, whole_weights
from tests.parallel import parallel

# Chosen by zero and run.reproducible, not by [data_parallel]: tests of their own.
OTHERWISE = ("sharded", "tree")
SETTINGS: dict[str, dict[str, Any]] = {
    "local": {"local_steps": 2, "outer_momentum": 0.9, "outer_learning_rate": 0.7},
    "decentralized": {"average_every": 3},
    "compressed": {"compressor": "top_k", "ratio": 0.1, "error_feedback": "mem_sgd"},
    "choco": {"method": "decentralized", "compressor": "qsgd", "consensus_rate": 0.5},
    "local codes": {"method": "local", "local_steps": 2} | {
        "compressor": "top_k", "ratio": 0.1, "error_feedback": "mem_sgd"},
}  # fmt: skip
NAMES = [*(name for name in METHODS if name not in OTHERWISE), "local codes"]
LONG = pytest.mark.long


def short(*few: str) -> list:
    """All methods; those that are not among a `few` marked long."""
    return [name if name in few else pytest.param(name, marks=LONG) for name in NAMES]


BASE = {
    "model.layers": 4,
    "model.tie_embeddings": False,
    "batch.micro_size": 1,
    "run.steps": 8,
    "data_parallel.consensus_every": 2,
}


def asked(method: str, **sizes: int) -> dict[str, Any]:
    """The changes of a configuration that trains by `method` in a layout."""
    told = {"method": method, **SETTINGS.get(method, {})}
    settings = {f"data_parallel.{key}": value for key, value in told.items()}
    differs = told["method"] in DIFFERING
    base = {key: value for key, value in BASE.items() if differs or "consensus_every" not in key}
    return {**base, **settings, **layout(**sizes)}


def run(engine: Engine, first: int, last: int) -> list[tuple[Any, ...]]:
    """What is told of steps."""
    rank = engine.axes["data"].rank
    found = [engine.step(k, microbatches(engine.config, k, rank)) for k in range(first, last)]
    return [(one.loss, one.grad_norm, one.consensus) for one in found]


def replica(engine: Engine) -> dict[str, torch.Tensor]:
    """The whole weights of each replica, by `NUMBER NAME`."""
    found = {}
    number = engine.axes["data"].rank
    for of in range(engine.axes["data"].size):
        mine = [piece for piece in engine.state.pieces() if piece.kind == "weights"]
        everyone = engine.axes.world.all_gather_object(
            [piece.copied() for piece in mine] if of == number else []
        )
        for pieces in everyone:
            for piece in pieces:
                whole = found.setdefault(f"{of} {piece.name}", piece.values.new_zeros(piece.shape))
                whole[piece.box.index] = piece.values
    return found


@pytest.mark.long
@parallel(ranks=[4], limit_s=120)
@pytest.mark.parametrize("method", short("local codes"))
def test_same_bits_in_every_pipeline_and_to_rounding_over_tensor_ranks(comm, method):
    world = World(comm)
    first = world.first(2)
    plain = None
    if first is not None:
        engine = build(first, asked(method, d=2))
        plain = (run(engine, 0, 4), replica(engine))
    plain = comm.bcast(plain)
    ways = [{"p": 2}, {"p": 2, "v": 2}, {"t": 2}]
    for sizes in ways:
        engine = build(world, asked(method, d=2, **sizes))
        told, weights = run(engine, 0, 4), replica(engine)
        if "t" not in sizes:
            assert told == plain[0], sizes
            assert all(torch.equal(weights[name], plain[1][name]) for name in weights), sizes
        else:
            assert [one[0] for one in told] == pytest.approx([one[0] for one in plain[0]], rel=1e-5)
    differ = not all(
        torch.equal(value, plain[1][f"0 {name[2:]}"]) for name, value in plain[1].items()
    )
    assert differ <= (asked(method)["data_parallel.method"] in DIFFERING)


@pytest.mark.cases(1)
@parallel(ranks=[2], limit_s=90)
@pytest.mark.parametrize("method", short("choco", "local codes"))
def test_a_resumed_run_has_the_same_bits(comm, tmp_path, method):
    world = World(comm)
    straight = build(world, asked(method, d=2))
    run(straight, 0, 3)  # within a round of two or three steps
    saves = Checkpoints(tmp_path, straight.state, straight.axes, course(straight.config))
    saves.save(3)
    # as a preview of the run says
    config = straight.config
    numbers = stored_numbers(config.data_parallel, len(config.optimizer.moments), 2)
    assert saves.state_bytes == numbers * 4 * parameter_count(config.model, straight.vocab_size)
    expected = run(straight, 3, 6)
    resumed = build(world, asked(method, d=2))
    Checkpoints(tmp_path, resumed.state, resumed.axes, course(resumed.config)).resume("auto")
    assert run(resumed, 3, 6) == expected
    assert all(map(torch.equal, resumed.state.flats, straight.state.flats))


@parallel(ranks=[2], limit_s=60)
@pytest.mark.parametrize("method", short("decentralized", "compressed")[3:])
def test_a_wire_whose_sums_overlap_has_the_same_bits(comm, method):
    """On two ranks, for the sum of two numbers has one order."""
    told = []
    for wire in ("mpi", "torch"):
        world, config = World(comm), small(asked(method, d=2), 2)
        axes = world.split(grid_of(config), wire_named(wire))
        told.append(run(Engine(config, axes, VOCAB_SIZE), 0, 3))
    assert told[0] == told[1]


@parallel(ranks=[3], limit_s=90)
@pytest.mark.parametrize("method", ["ring", pytest.param("parameter_server", marks=LONG)])
def test_a_sum_by_messages_has_the_bits_of_all_reduce(comm, method):
    changes = {"batch.global_size": 6, "run.steps": 5, "data_parallel.consensus_every": None}
    engines = [
        build(World(comm), {**asked(name, d=3), **changes}) for name in ("all_reduce", method)
    ]
    told = [run(engine, 0, 3) for engine in engines]
    assert told[0] == told[1]
    assert all(map(torch.equal, engines[0].state.flats, engines[1].state.flats))
    sent = engines[1].axes["data"].tally.messages["send"]
    gradients = engines[1].buffer.gradients.nbytes
    # 2 (n - 1) of each, n - 1 of the last two; the server's two, and one of each other
    expected = {"ring": [4, 2, 2], "parameter_server": [2, 1, 1]}[method]
    assert comm.allgather(sent) == [3 * count for count in expected]
    total = sum(comm.allgather(engines[1].axes["data"].tally.sent_bytes["send"]))
    assert total == pytest.approx(3 * 4 * gradients, rel=1e-3)


@parallel(ranks=[2], limit_s=60)
@pytest.mark.parametrize("momentum", [None, *(pytest.param(m, marks=LONG) for m in (0.0, 0.9))])
@pytest.mark.parametrize("method", short("local", "compressed", "choco"))
def test_what_is_kept_is_what_is_counted(comm, method, momentum):
    """The optimizer's moments and the method's own kinds, beside every master."""
    kind = {} if momentum is None else {"optimizer.kind": "sgd", "optimizer.momentum": momentum}
    engine = build(World(comm), {**asked(method, d=2), **kind})
    kept = set(engine.state.kinds) - {"weights", *engine.config.optimizer.moments}
    assert kept == set(engine.config.data_parallel.kinds) == set(engine.policy.kinds)
    kinds = engine.state.kinds
    held = sum(part.nbytes for name in kinds if name != "weights" for part in kinds[name].parts)
    memory = MemoryModel.of(engine.config, engine.vocab_size)
    counted = memory.peak(engine.config.layout, 0, engine.config.microbatches).optimizer
    # parameters begin at multiples of 256 elements, and small ones leave much of that empty
    used = sum(entry.elements for entry in engine.buffer.entries.values()) / engine.buffer.size
    assert counted == pytest.approx(held * used, rel=1e-6)


@pytest.mark.long
@pytest.mark.cases(1)
@parallel(ranks=[3], limit_s=60)
@pytest.mark.parametrize(
    ("method", "overlap"),
    [("ring", False), ("decentralized", True)]
    + [pytest.param(name, False, marks=LONG) for name in ("parameter_server", "decentralized")],
)
def test_what_is_received_into_is_counted(comm, method, overlap):
    """The most that the allocator gives to messages, on the rank that needs most."""
    settings = {"data_parallel.overlap": overlap or None, "data_parallel.average_every": None}
    engine = build(World(comm), {**asked(method, d=3), **settings, "batch.global_size": 6})
    run(engine, 0, 1)
    engine.policy.settle()
    mixes = method == "decentralized"
    work = (lambda: engine.policy.after_update(1, False)) if mixes else engine.policy.reduce
    most = max(comm.allgather(measured(work)[1]))
    config, buffer = engine.config, engine.buffer
    elements = buffer.size if mixes else buffer.gradient_size
    counted = RunMethod.of(config).room_bytes(3, elements, 4)
    assert most == pytest.approx(counted, rel=0.05)
    engine.policy.settle()


@parallel(ranks=[4], limit_s=60)
def test_one_local_step_is_a_step_of_all(comm):
    """K = 1 with SGD, whose step is linear in the gradient: to 1e-12 in float64."""
    sgd = {
        "precision.compute": "fp64",
        "optimizer.kind": "sgd",
        "optimizer.momentum": 0.9,
        "optimizer.clip_norm": 0.0,
        "optimizer.learning_rate": 0.1,
        "data_parallel.local_steps": None,
        "data_parallel.outer_momentum": None,
        "data_parallel.outer_learning_rate": None,
    }
    d = comm.size
    plain = build(World(comm), {**asked("all_reduce", d=d), **sgd})
    average = {"data_parallel.average_moments": True}
    local = build(World(comm), {**asked("local", d=d), **sgd, **average})
    expected = run(plain, 0, 5)
    found = run(local, 0, 5)
    assert [one[0] for one in found] == pytest.approx([one[0] for one in expected], rel=1e-12)
    weights, others = whole_weights(plain), replica(local)
    for name, value in others.items():
        whole = weights[name.split(" ")[1]]
        assert (value - whole).abs().max() <= 1e-12 * whole.abs().max()
