"""Four ways to cut an MLP: the collectives that the table names make them equal to the whole."""

import numpy as np
import pytest

from ptdmpi.config import InputError
from ptdmpi.plan.ask import partition
from ptdmpi.plan.cost.price import Pricer
from ptdmpi.plan.machine.cluster import load_cluster, load_model

T, H, G, ROWS = 4, 8, 16, 3


class Ranks:
    """Collectives over lists with a tensor of each rank; `log` has (kind, whole columns)."""

    def __init__(self):
        self.log = []

    def sum(self, parts):
        self.log.append((partition.SUM, parts[0].shape[1]))
        return [np.sum(parts, axis=0)] * T

    def gather(self, parts):
        self.log.append((partition.GATHER, T * parts[0].shape[1]))
        return [np.concatenate(parts, axis=1)] * T

    def scatter(self, parts):
        self.log.append((partition.SCATTER, parts[0].shape[1]))
        return np.split(np.sum(parts, axis=0), T, axis=1)


def product(parts, weights):
    return [part @ weight for part, weight in zip(parts, weights, strict=True)]


def way_by_way(ranks, way, x, a, b, dy):
    """(Y, dX) of f(X A) B with f(u) = u^3, on every rank, by cut weights."""
    first, second = way.name.split(", ")
    cut = {"columns": 1, "rows": 0}
    ours_a, ours_b = np.split(a, T, axis=cut[first]), np.split(b, T, axis=cut[second])
    # forward: columns want the whole input, rows their part of it
    inputs = [x] * T if first == "columns" else np.split(x, T, axis=1)
    u = product(inputs, ours_a)
    if first == "rows":
        u = ranks.scatter(u) if second == "rows" else ranks.sum(u)
    z = [part**3 for part in u]
    if (first, second) == ("columns", "columns"):
        z = ranks.gather(z)
    y = product(z, ours_b)
    y = ranks.sum(y) if second == "rows" else ranks.gather(y)
    # backward: of columns comes a summand of the input's gradient, of rows its part
    given = [dy] * T if second == "rows" else np.split(dy, T, axis=1)
    dz = product(given, [weight.T for weight in ours_b])
    if second == "columns":
        dz = ranks.scatter(dz) if first == "columns" else ranks.sum(dz)
    du = [3 * part**2 * grad for part, grad in zip(u, dz, strict=True)]
    if (first, second) == ("rows", "rows"):
        du = ranks.gather(du)
    dx = product(du, [weight.T for weight in ours_a])
    dx = ranks.sum(dx) if first == "columns" else ranks.gather(dx)
    return y, dx


@pytest.mark.parametrize("way", partition.WAYS, ids=lambda way: way.name)
def test_each_way_is_the_whole_and_sends_what_the_table_says(way):
    random = np.random.default_rng(5)
    x, dy = random.normal(size=(2, ROWS, H))
    a, b = random.normal(size=(H, G)), random.normal(size=(G, H))
    ranks = Ranks()
    y, dx = way_by_way(ranks, way, x, a, b, dy)
    u = x @ a
    for rank in range(T):
        np.testing.assert_allclose(y[rank], u**3 @ b)
        np.testing.assert_allclose(dx[rank], (3 * u**2 * (dy @ b.T)) @ a.T)
    columns = {"h": H, "g": G, "u": G}
    assert sorted(ranks.log) == sorted((kind, columns[size]) for kind, size in way.sends)


def test_columns_then_rows_sends_least():
    """With g = 4 h the others send 11, 11 and 18 of its 4 units."""
    sent = [partition.sent(way, {"h": 1, "g": 4, "u": 4}, 8) / (7 / 8) for way in partition.WAYS]
    assert sent == [4, 11, 11, 18]


def test_of_a_model():
    pricer = Pricer.of(load_cluster("selene"), load_model("llama-65b"), 1, "bf16")
    told = partition.answer(pricer, 8, 1)
    bytes_sent = [way["sent_bytes"] for way in told.numbers["ways"]]
    assert bytes_sent[0] == 4 * 2048 * 8192 * 2 * 7 / 8 == min(bytes_sent)
    seconds = [way["seconds"] for way in told.numbers["ways"]]
    assert min(seconds) == seconds[0]
    # a gated function has two tensors in front of it
    assert bytes_sent[2] > bytes_sent[1]
    with pytest.raises(InputError, match="--tensor 7: legal are 2, 4, 8"):
        partition.answer(pricer, 7, 1)
