"""Topologies average: doubly stochastic, connected over a period, the same seen from both ends;
their spectral gaps are those of the literature."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ptdmpi.config import DataParallelConfig, InputError
from ptdmpi.plan.layout.graphs import Circulant, Undirected, matrix
from ptdmpi.plan.layout.topology import TOPOLOGIES, check, file_ranks, file_sha256, sides, topology

DIRECTED = ("exponential", "one_peer_exponential")
sizes = st.integers(1, 24)
names = st.sampled_from(sorted(TOPOLOGIES))


@settings(max_examples=60, deadline=None)
@given(names, sizes, st.integers(0, 10**6), st.integers(0, 2**40))
def test_weights_are_doubly_stochastic_and_messages_match(name, size, step, seed):
    found = topology(name, size, seed)
    weights = np.array(matrix(found, step))
    assert (weights >= 0).all() and (np.diag(weights) > 0).all()
    assert np.allclose(weights.sum(0), 1, atol=1e-14) and np.allclose(weights.sum(1), 1, atol=1e-14)
    if name not in DIRECTED:
        assert (weights == weights.T).all()
    for rank in range(size):
        row = found.row(step, rank)
        assert list(row) == sorted(row) and sum(row.values()) == 1
        sources, targets = found.sources(step, rank), found.destinations(step, rank)
        assert all(rank in found.destinations(step, peer) for peer in sources)
        assert all(rank in found.sources(step, peer) for peer in targets)
        assert all(
            found.row(step, peer)[rank] == found.column(step, rank)[peer] for peer in targets
        )
    check(found)


@settings(max_examples=60, deadline=None)
@given(names, sizes, st.integers(0, 9))
def test_graphs_connect_all_ranks_over_a_period_and_repeat_after_it(name, size, seed):
    found = topology(name, size, seed)
    steps = found.period or 60  # random pairs: that many join 24 ranks but for a chance of 1e-9
    product = np.eye(size)
    for step in range(steps):
        product = np.array(matrix(found, step)) @ product
        if found.period:
            assert matrix(found, step) == matrix(found, step + found.period)
    # each rank has something of every other: ring and grid after as many steps as they are long
    reached = np.linalg.matrix_power(product, size)
    assert (reached > 0).all()
    assert np.allclose(reached.sum(0), 1)
    assert found.contraction() < 1 and (size > 1 or found.contraction() == 0)


@pytest.mark.parametrize("size", [2, 3, 4, 5, 8, 16, 21, 32])
def test_spectral_gaps_are_the_closed_forms(size):
    gap = {name: topology(name, size).spectral_gap for name in TOPOLOGIES}
    assert gap["complete"] == 1
    if size > 3:  # eigenvalues (1 + 2 cos(2 pi k / n)) / 3; the least is -1/3
        ring = (1 + 2 * math.cos(2 * math.pi / size)) / 3
        assert gap["ring"] == pytest.approx(1 - max(ring, 1 / 3))
    if size & (size - 1) == 0:
        bits = int(math.log2(size))
        assert gap["hypercube"] == pytest.approx(2 / (1 + bits))  # eigenvalues 1 - 2 m / (1 + bits)
        assert gap["one_peer_exponential"] == 1
    if size % 2 == 0:  # Ying et al. 2021, arXiv 2110.13363, proposition 1
        assert gap["exponential"] == pytest.approx(2 / (1 + math.ceil(math.log2(size))))
    assert gap["random"] == pytest.approx(1 - mean_square_contraction(size))
    if size >= 16:
        # at 16 torus and exponential are equal, but for rounding
        order = [gap[name] for name in ("ring", "grid", "torus", "exponential", "complete")]
        assert order == pytest.approx(sorted(order))


def mean_square_contraction(size: int) -> float:
    """The root of the second eigenvalue of the mean of W^T W, for random pairs."""
    found, steps = topology("random", size, 3), 20
    mean = np.zeros((size, size))
    for step in range(steps):
        weights = np.array(matrix(found, step))
        mean += weights.T @ weights / steps
    # between different ranks all entries are one number, and chance has spread them
    off = (mean.sum() - np.trace(mean)) / (size * size - size)
    return math.sqrt(max(0.0, np.trace(mean) / size - off))


@pytest.mark.parametrize("bits", range(7))
def test_one_peer_exponential_averages_exactly_in_log2_n_steps(bits):
    found = topology("one_peer_exponential", 1 << bits)
    product = np.eye(1 << bits)
    for step in range(3, 3 + bits):  # from any step on
        product = np.array(matrix(found, step)) @ product
    assert (product == 1 / (1 << bits)).all()
    assert found.most_neighbours == min(1, bits)


def test_random_pairs_are_keyed_by_seed_and_step_alone():
    def pairs(seed: int, step: int) -> list[tuple[int, ...]]:
        found = topology("random", 8, seed)
        return [found.sources(step, rank) for rank in range(8)]

    assert pairs(1, 5) == pairs(1, 5) != pairs(2, 5)
    assert pairs(1, 5) != pairs(1, 6)
    # of every version and machine: a run goes on with the pairs that it began with
    assert pairs(0, 0) == [(2,), (6,), (0,), (5,), (7,), (3,), (1,), (4,)]


def test_grids_are_nearest_to_a_square():
    assert [sides(n) for n in (1, 2, 6, 7, 12, 16)] == [
        (1, 1),
        (1, 2),
        (2, 3),
        (1, 7),
        (3, 4),
        (4, 4),
    ]
    grid, torus = topology("grid", 12), topology("torus", 12)
    assert grid.sources(0, 0) == (1, 4) and torus.sources(0, 0) == (1, 3, 4, 8)
    assert grid.sources(0, 5) == torus.sources(0, 5) == (1, 4, 6, 9)


def test_a_file_of_edges(tmp_path):
    file = tmp_path / "edges"
    file.write_text("# a line of three and back\n0 1\n\n2, 1  # the last\n1 0\n")
    found = topology(str(file), 3)
    assert [found.sources(0, rank) for rank in range(3)] == [(1,), (0, 2), (1,)]
    assert matrix(found, 7) == [[2 / 3, 1 / 3, 0], [1 / 3, 1 / 3, 1 / 3], [0, 1 / 3, 2 / 3]]
    file.write_text("0 1 0.25\n1 2 1/8\n")
    assert matrix(topology(str(file), 3), 0) == [
        [0.75, 0.25, 0],
        [0.25, 0.625, 0.125],
        [0, 0.125, 0.875],
    ]
    file.write_text("")
    assert matrix(topology(str(file), 1), 0) == [[1]]


def test_a_file_is_read_whatever_an_editor_puts_in_front_of_it(tmp_path):
    (tmp_path / "edges").write_bytes(b"\xef\xbb\xbf0 1\n")
    assert matrix(topology(str(tmp_path / "edges"), 2), 0) == [[0.5, 0.5], [0.5, 0.5]]


def test_a_file_is_known_by_its_edges(tmp_path):
    """Not by order, blanks, comments, or another way to write a weight."""
    texts = ["0 1 0.5\n2, 1 0.25 # c\n", "1 2 1/4\n\n1 0 0.50\n", "0 1 0.5\n1 2 0.3", "0 1\n1 2"]
    shas = []
    for number, text in enumerate(texts):
        (tmp_path / str(number)).write_text(text)
        named = {"method": "decentralized", "topology": str(tmp_path / str(number))}
        section = DataParallelConfig.model_validate(named)
        shas.append(file_sha256(section))
        assert file_ranks(section) == 3
    assert shas[0] == shas[1] and len(set(shas)) == 3
    plain = DataParallelConfig.model_validate({"method": "decentralized"})
    assert file_sha256(plain) is None and file_ranks(plain) is None


WRONG = {
    "0 1\n1 x": r"line 2: '1 x' is not an edge; legal: \"0 1\"",
    "0": r"line 1: '0' is not an edge",
    "0 1 2 3": r"line 1: '0 1 2 3' has 4 columns",
    "0 1 nan": r"line 1: '0 1 nan' is not an edge",
    "0 1\n1 3": r"line 2: '1 3': there is no data rank 3 of d = 3; legal: 0 to 2, or",
    "0 1\n-1 2": r"there is no data rank -1",
    "0 1\n2 2": r"line 2: '2 2': a rank has no edge to itself",
    "0 1 1.5": r"above 0 and below 1",
    "0 1 0.5\n1 0 0.4": r"line 2: '1 0 0.4' gives the edge another weight",
    "0 1 0.5\n1 2": r"line 2: '1 2': legal: weights of all edges, or of none",
    "0 1\n1 2 0.5": r"line 2: '1 2 0.5': legal: weights of all edges, or of none",
    "0 1": r"rank 2 of the 3 data ranks has no edge; legal: every rank from 0 to 2",
    "0 1 0.5\n1 2 0.5": r"edges of rank 1 sum to 1; legal: less than 1",
}


@pytest.mark.parametrize("text", WRONG)
def test_files_that_do_not_fit_are_refused_in_one_line(tmp_path, text):
    file = tmp_path / "edges"
    file.write_text(text)
    with pytest.raises(InputError, match=WRONG[text]) as error:
        topology(str(file), 3)
    assert "\n" not in str(error.value) and str(file) in str(error.value)


def test_graphs_that_do_not_connect_are_refused(tmp_path):
    file = tmp_path / "edges"
    file.write_text("0 1\n2 3")
    with pytest.raises(InputError, match="ranks 2, 3 are not connected with 0, 1; legal"):
        topology(str(file), 4)
    with pytest.raises(InputError, match=r"nor a file of edges \(No such file .*legal: ring, grid"):
        topology("rnig", 4)
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    with pytest.raises(InputError, match=r"nor a file of edges \(no text\)"):
        topology(str(tmp_path / "bytes"), 4)


def test_the_check_finds_weights_that_are_no_average():
    broken = Undirected("broken", 4, lambda rank: {(rank + 1) % 4})  # without the way back
    with pytest.raises(InputError, match="broken: "):
        check(broken)
    crossed = Circulant("crossed", 4, [[1]])
    crossed.column = crossed.row  # sends where it hears from
    with pytest.raises(InputError, match="rank 0 expects messages that are not sent"):
        check(crossed)
