"""Codes of what local steps have moved, and between neighbours (CHOCO-SGD): what n simulated
workers in numpy do, and, where codes leave nothing out, what is done without them."""

import numpy as np
import pytest
import torch

from ptdmpi.comm.world import World
from ptdmpi.model.random import fold
from ptdmpi.plan.layout.graphs import matrix
from ptdmpi.plan.layout.topology import topology
from tests._configs import layout
from tests._engines import build
from tests._matrix_form import EXACT, RATE, simulated, trained
from tests.engine.compress import _reference
from tests.engine.compress._given import fill, units_of
from tests.parallel import parallel

OPTIONS = {"top_k": {"ratio": 0.05}, "random_k": {"ratio": 0.05}, "qsgd": {"levels": 3}}
OPTIONS |= {"sign": {}, "int8": {"block": 100}, "int4": {"block": 32}}
LONG = [pytest.param(one, marks=pytest.mark.long) for one in OPTIONS if one != "top_k"]
NAMES = ["top_k", *LONG]
SMALL = {"precision.compute": "fp64", "model.layers": 1, "batch.micro_size": 1}


def asked(method: str, **keys):
    return {f"data_parallel.{key}": value for key, value in {"method": method, **keys}.items()}


class Given:
    """An engine whose replicas are moved by given gradients, and the method's part of a step."""

    def __init__(self, comm, told: dict) -> None:
        self.comm = comm
        self.engine = build(World(comm), layout(d=comm.size) | SMALL | told)
        self.units = units_of(self.engine)
        self.used = np.concatenate([places for _, places in self.units])

    def workers(self, feedback: str, compressor: str) -> _reference.Workers:
        size = self.engine.buffer.size
        return _reference.Workers(
            feedback, compressor, OPTIONS[compressor], self.units, self.comm.size, size
        )

    def key(self) -> int:
        return fold(self.engine.config.run.seed, 1_000_003, self.engine.state.counters.updates)

    def all(self, kind: str = "weights") -> np.ndarray:
        """[n, size] of one kind, of all replicas."""
        mine = self.engine.state.kinds[kind].parts[0].numpy()
        return np.stack(self.comm.allgather(mine.copy()))

    def moved(self, step: int) -> np.ndarray:
        """Move each replica by its given gradient; [n, size] of all of them."""
        fill(self.engine, step)
        size = self.engine.buffer.size
        with torch.no_grad():
            self.engine.buffer.masters[0].sub_(self.engine.buffer.gradients[:size], alpha=RATE)
        return self.all()


@parallel(ranks=[4])
@pytest.mark.parametrize("compressor", NAMES)
def test_choco_is_its_matrix_form(comm, compressor):
    """H += C(X - H), X += rate (W - 1) H, on a ring."""
    told = {"topology": "ring", "consensus_rate": 0.3, "compressor": compressor}
    given = Given(comm, asked("decentralized", **told, **OPTIONS[compressor]))
    workers = given.workers("mem_sgd", compressor)  # which contracts
    public, weights = given.all(), np.array(matrix(topology("ring", comm.size), 0))
    for step in range(4):
        x, key = given.moved(step), given.key()
        codes = [workers.code(x[i] - public[i], key, i) for i in range(comm.size)]
        public = public + np.array(codes)
        x = x + 0.3 * (weights - np.eye(comm.size)) @ public
        given.engine.policy.after_update(step, False)
        given.engine.state.counters.updates += 1
        for kind, expected in (("weights", x), ("public", public)):
            found = given.all(kind)[:, given.used]
            assert np.abs(found - expected[:, given.used]).max() <= 1e-10
    assert np.abs(x - x[0]).max() > 1e-3
    # what is known of neighbours is what they have made public, to the bit
    known = given.engine.policy._copies.numpy()[:, given.used]
    peers = given.engine.policy._graphs[0].sources
    assert (known == given.all("public")[np.array(peers)][:, given.used]).all()


@parallel(ranks=[4])
@pytest.mark.parametrize("compressor", NAMES)
@pytest.mark.parametrize("feedback", ["none", "mem_sgd"])
def test_codes_of_local_steps_are_their_matrix_form(comm, compressor, feedback):
    """Two rounds of two steps: anchor <- anchor - (0.7 of the mean of codes, with momentum)."""
    told = {"local_steps": 2, "outer_learning_rate": 0.7, "outer_momentum": 0.5}
    told |= {"compressor": compressor, "error_feedback": feedback, **OPTIONS[compressor]}
    given = Given(comm, asked("local", **told))
    workers = given.workers(feedback, compressor)
    anchor = given.all()[0]
    error, velocity = np.zeros((comm.size, len(anchor))), np.zeros(len(anchor))
    for step in range(4):
        x, key = given.moved(step), given.key()
        if step % 2:
            aimed = anchor - x + (error if feedback == "mem_sgd" else 0.0)
            codes = np.array([workers.code(one, key, i) for i, one in enumerate(aimed)])
            error, mean = aimed - codes, codes.mean(0)
            velocity = 0.5 * velocity + mean
            anchor = anchor - 0.7 * (mean + 0.5 * velocity)
            x = np.stack([anchor] * comm.size)
        given.engine.policy.after_update(step, False)
        given.engine.state.counters.updates += 1
        found = given.all()[:, given.used]
        assert np.abs(found - x[:, given.used]).max() <= 1e-10
        assert (found == found[0]).all() == bool(step % 2)


@pytest.mark.long
@parallel(ranks=[4])
def test_codes_that_leave_nothing_out_are_averages(comm):
    """With ratio 1 CHOCO-SGD at rate 1 is X <- W (X - rate G), and local steps go on from their
    mean."""
    whole = {"data_parallel.compressor": "random_k", "data_parallel.ratio": 1.0}
    weights = np.array(matrix(topology("ring", comm.size), 0))
    gossip = {**EXACT, **whole, **asked("decentralized", consensus_rate=1.0)}
    expected = simulated(comm, gossip, lambda x, g, step: weights @ (x - RATE * g))
    assert np.abs(trained(comm, gossip) - expected).max() < 1e-12
    local = {**EXACT, **asked("local", local_steps=2)}
    codes = trained(comm, {**local, **whole, "data_parallel.error_feedback": "mem_sgd"})
    assert np.abs(codes - trained(comm, local)).max() < 1e-12


@pytest.mark.long
@parallel(ranks=[4])
def test_choco_brings_replicas_together_at_its_default(comm):
    """Nothing moves but messages: with 1 % of the elements the default rate is stable, and replicas
    come nearer to their mean, which stays."""
    told = asked("decentralized", compressor="top_k", topology="ring")
    given = Given(comm, told)
    x = given.moved(0)
    mean, apart = x.mean(0), []
    for step in range(120):
        given.engine.policy.after_update(step, False)
        given.engine.state.counters.updates += 1
        if step % 40 == 39:
            found = given.all()
            apart.append(np.linalg.norm(found - found.mean(0)))
    assert np.abs(found.mean(0) - mean).max() < 1e-12
    first = np.linalg.norm(x - mean)
    assert first > apart[0] > apart[1] > apart[2]
