"""Decentralised SGD is its matrix form, X <- W (X - rate G), whatever the layout; with all replicas
as neighbours it is SGD over all of them."""

from unittest.mock import patch

import numpy as np
import pytest
import torch

from ptdmpi.checkpoint.save import Checkpoints
from ptdmpi.comm.world import World
from ptdmpi.engine.data_parallel import decentralized
from ptdmpi.plan.layout.graphs import matrix
from ptdmpi.plan.layout.topology import topology
from tests._configs import layout
from tests._engines import build, course, microbatches, steps_of
from tests._matrix_form import EXACT as WHOLE
from tests._matrix_form import RATE, STEPS, TINY, simulated, trained
from tests.parallel import parallel

EXACT = {**WHOLE, "data_parallel.method": "decentralized"}


LONG = [
    pytest.param(name, 0, marks=pytest.mark.long)
    for name in ("grid", "exponential", "one_peer_exponential", "complete")
]


@pytest.mark.cases(1)
@parallel(ranks=[4])
@pytest.mark.parametrize(("name", "every"), [("random", 0), ("FILE", 0), ("ring", 3), *LONG])
def test_training_is_the_matrix_form(comm, tmp_path, name, every):
    if name == "FILE":
        name = comm.bcast(str(tmp_path / "edges"))
        if comm.rank == 0:
            (tmp_path / "edges").write_text("0 1 0.3\n1 2 0.3\n2 3 0.5\n")
        comm.Barrier()
    graph = topology(name, comm.size, 11)

    def update(x, gradients, step: int):
        weights = np.array(matrix(graph, step))
        if every and (step + 1) % every == 0:
            weights = np.full((comm.size, comm.size), 1 / comm.size)
        return weights @ (x - RATE * gradients)

    changes = {**EXACT, "data_parallel.topology": name, "data_parallel.average_every": every}
    expected, found = simulated(comm, changes, update), trained(comm, changes)
    assert np.abs(found - expected).max() < 1e-10, name
    spread = np.abs(found - found.mean(0)).max()
    assert (spread < 1e-12) == (name == "complete"), (name, spread)


@parallel(ranks=[4])
def test_a_complete_graph_is_sgd_over_all_ranks(comm):
    plain = trained(comm, WHOLE)
    found = trained(comm, {**EXACT, "data_parallel.topology": "complete"})
    assert np.abs(found - plain).max() < 1e-12
    every = trained(comm, {**EXACT, "data_parallel.average_every": 1})
    assert np.abs(every - plain).max() < 1e-12 and (every == every[0]).all()


def run_of(comm, changes: dict, ranks: int) -> tuple:
    """Losses, norms and each replica's whole weights, of a training on the first `ranks` ranks."""
    world = World(comm).first(ranks)
    if world is None:
        return ()
    base = {**TINY, "optimizer.learning_rate": 3e-3, "data_parallel.method": "decentralized"}
    engine = build(world, {**base, **changes})
    results = steps_of(engine, STEPS)
    overlaps = engine.config.data_parallel.overlap
    assert engine.policy.settled != overlaps
    weights = {}
    for one in engine.state.pieces():  # which settles what is under way
        assert engine.policy.settled
        weights[(one.kind, one.replica, one.name, str(one.box))] = one.values.clone()
    told = [(result.loss, result.grad_norm) for result in results]
    return told, weights


WHERE = [
    (layout(d=2), True),
    ({**layout(p=2, d=2), "parallel.schedule": "zb-h1"}, False),
    (layout(p=2, v=2, d=2), True),
]


@pytest.mark.long
@parallel(ranks=[4])
def test_bits_do_not_depend_on_schedule_buckets_or_overlap(comm):
    more = {"data_parallel.topology": "random", "data_parallel.average_moments": True}
    more |= {"model.layers": 4, "data_parallel.average_every": 3, "precision.compute": "bf16"}
    known = gathered(comm, run_of(comm, {**more, **layout(d=2)}, 2))
    with patch.object(decentralized, "BUCKET_ELEMENTS", 1000):
        for where, overlap in WHERE:
            changes = {**more, **where, "data_parallel.overlap": overlap}
            found = run_of(comm, changes, 2 * where["parallel.pipeline"])
            assert gathered(comm, found) == known, where


def gathered(comm, run: tuple) -> tuple:
    """The runs of all ranks as one, its tensors as bytes."""
    everyone = [one for one in comm.allgather(run) if one]
    told = [one[0] for one in everyone]
    assert all(one == told[0] for one in told)
    whole: dict = {}
    for _, weights in everyone:
        for key, values in weights.items():
            bits = values.numpy().tobytes()
            assert whole.setdefault(key, bits) == bits
    return told[0], whole


@parallel(ranks=[4])
def test_a_checkpoint_between_two_steps_has_what_was_under_way(comm, tmp_path):
    """Saved while an exchange is under way, resumed without overlap and on another schedule."""
    world, saved = World(comm), 3
    more = {**TINY, "optimizer.learning_rate": 3e-3, "data_parallel.method": "decentralized"}
    more |= {"data_parallel.topology": "random", **layout(p=2, d=2), "data_parallel.overlap": True}

    def step(engine, first: int, last: int) -> list[tuple[float, float]]:
        rank = engine.axes["data"].rank
        found = [engine.step(k, microbatches(engine.config, k, rank)) for k in range(first, last)]
        return [(one.loss, one.grad_norm) for one in found]

    engine = build(world, more)
    # as a run has them: from before its first step
    saves = Checkpoints(tmp_path, engine.state, engine.axes, course(engine.config))
    step(engine, 0, saved)
    assert not engine.policy.settled
    saves.save(saved)
    assert engine.policy.settled
    expected = step(engine, saved, saved + 3)
    other = {**more, "data_parallel.overlap": False, "parallel.schedule": "zb-h1"}
    resumed = build(world, other)
    loads = Checkpoints(tmp_path, resumed.state, resumed.axes, course(resumed.config))
    progress, _ = loads.resume(str(tmp_path))
    assert progress.step == saved
    assert step(resumed, saved, saved + 3) == expected


@parallel(ranks=[4])
def test_the_tensor_axis_mixes_its_parts_on_the_same_graph(comm):
    """In float64: sums over the tensor axis add in another order."""
    more = {"precision.compute": "fp64", "data_parallel.topology": "ring"}
    runs = [run_of(comm, {**more, **layout(t=t, d=2)}, 2 * t) for t in (1, 2)]
    (told, _), (other, _) = runs[0] or ([], 0), runs[1]
    told = comm.bcast(told)
    assert np.allclose(told, other, rtol=1e-10, atol=0)


@parallel(ranks=[4])
def test_a_skipped_step_averages_nothing(comm):
    engine = build(World(comm), {**EXACT, "parallel.data": 4})
    steps_of(engine, 1, masked=False)
    before = engine.buffer.masters[0].clone()
    assert not torch.equal(before, comm.bcast(before)) or comm.rank == 0
    batches = microbatches(engine.config, 1, comm.rank, masked=False)
    with patch.object(type(engine.policy), "agreed", lambda self, value: float("nan")):
        assert engine.step(1, batches).skipped
    assert torch.equal(engine.buffer.masters[0], before)


@parallel(ranks=[4])
def test_bytes_are_those_of_the_graph(comm):
    """Whole masters to each neighbour, and nothing else of the parameters on the data axis."""
    for name in ("ring", "one_peer_exponential", "random", "exponential"):
        engine = build(World(comm), {**EXACT, "data_parallel.topology": name, "parallel.data": 4})
        results = steps_of(engine, STEPS, masked=False)
        graph = topology(name, 4, 11)
        sent = [one.traffic.sent_bytes["data"]["neighbours"] for one in results]
        degrees = [len(graph.destinations(step, comm.rank)) for step in range(STEPS)]
        assert sent == [n * engine.buffer.size * 8 for n in degrees]
        assert all(set(one.traffic.sent_bytes["data"]) == {"neighbours"} for one in results[:-1])
