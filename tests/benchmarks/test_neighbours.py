"""What is said of decentralised averaging: known errors, the order of topologies, and sides that
are what they are called."""

import numpy as np
import pytest

from benchmarks.less import transient
from benchmarks.network import neighbours as shaped
from ptdmpi.plan.layout.topology import topology


def test_errors_of_sgd_over_all_workers_are_the_closed_form():
    """(k + k0) x_(k+1) = (k + k0 - 1) x_k - mean noise, so that variances add up."""
    steps = np.arange(1, 201)
    known = transient.SIGMA**2 * steps / (5 * (steps - 1 + transient.OFFSET) ** 2)
    for apart in (0.0, 1.0):  # the workers' own minima do not count where all are averaged
        found = transient.errors(topology("complete", 5), 200, apart)
        assert np.allclose(found, known, rtol=1e-12, atol=0)


def test_errors_are_those_of_sampled_runs():
    """Over 4000 runs at once, on a graph that changes."""
    found, size, runs, random = (
        topology("one_peer_exponential", 4),
        4,
        4000,
        np.random.default_rng(0),
    )
    x, b = np.zeros((runs, size)), transient.optima(size, 1.0)
    for step in range(30):
        gradient = x - b + transient.SIGMA * random.standard_normal((runs, size))
        w = np.array(transient.matrix(found, step))
        x = (x - gradient / (step + transient.OFFSET)) @ w.T
    assert (x**2).mean() == pytest.approx(transient.errors(found, 30, 1.0)[-1], rel=0.1)


def test_sparser_graphs_have_more_transient_iterations():
    names = ("exponential", "grid", "ring")
    alike = [transient.transient(topology(name, 16), 2000, 0.0) for name in names]
    assert alike == sorted(alike) and alike[0] < alike[-1]
    assert transient.transient(topology("complete", 16), 200, 1.0) == 0
    assert transient.transient(topology("ring", 16), 50, 1.0) is None


@pytest.mark.parametrize("side", shaped.SIDES)
def test_sides_are_configurations(side):
    assert shaped.config_of(side, 4).data_size == 4
