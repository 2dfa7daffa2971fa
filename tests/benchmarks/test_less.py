"""The matrix forms of `make communicate-less`, and its tables, in seconds."""

import numpy as np
import pytest

from benchmarks.less import quadratic, theory
from benchmarks.less.communicate import label_groups
from benchmarks.less.quadratic import CompressedDescent, Problem, descend
from ptdmpi.plan.layout.topology import topology

SHORT = theory.Lengths(speed_up=800, topologies=3000, local=640, compressed=400, repeats=5)


def errors(way: quadratic.Update, steps: int = 30) -> np.ndarray:
    problem = Problem.drawn(8, 20, noise=1.0, apart=0.5)
    return descend(problem, way, steps, lambda step: 0.05, repeats=2)


@pytest.mark.parametrize(
    "way",
    [
        quadratic.local(1),
        quadratic.decentralized(topology("complete", 8)),
        quadratic.decentralized(topology("ring", 8), average_every=1),
        *(CompressedDescent(feedback, quadratic.top_k(20), 2) for feedback in theory.FEEDBACK),
    ],
)
def test_what_leaves_nothing_out_is_psgd(way):
    np.testing.assert_allclose(errors(way), errors(quadratic.parallel()), rtol=1e-12)


def test_the_minimum_is_where_the_mean_gradient_is_zero():
    problem = Problem.drawn(4, 6, noise=0.0, apart=1.0)
    at = np.broadcast_to(problem.optimum, (1, 4, 6))
    gradients = problem.gradients(at, np.random.default_rng(0))
    assert abs(gradients).max() > 0.1 and abs(gradients.mean(1)).max() < 1e-12


@pytest.mark.long
def test_the_orders_of_theory_hold_in_short():
    sped = theory.speed_up(SHORT)
    assert 3 < sped["PSGD"][4] / sped["PSGD"][16] < 5
    assert sped["DSGD, ring"][16] > sped["DSGD, exponential"][16] > sped["PSGD"][16]
    curves = theory.topologies(SHORT)
    late = {name: one.ratio[-1] for name, one in curves.items()}
    assert late["ring"] > late["grid"] > late["exponential"] > late["complete"]
    assert curves["complete"].ratio == pytest.approx(1.0)
    assert curves["ring"].gap < curves["grid"].gap < curves["exponential"].gap
    found = theory.compressed(SHORT)
    for ratio in theory.RATIOS:
        last = {name: found[name, ratio][-1] for name in theory.FEEDBACK}
        assert last["neolithic"] < last["mem_sgd"] < last["ef21"]
    apart = theory.local(SHORT)
    assert apart[32] > apart[1]


def test_points_whose_labels_would_overlap_share_one():
    points = [(1e4, 6.0), (1.02e4, 6.01), (1e6, 5.0), (1e4, 5.5), (1.05e6, 5.9)]
    assert label_groups(points) == [[0, 1], [2], [3], [4]]
