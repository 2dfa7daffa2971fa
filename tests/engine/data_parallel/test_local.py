"""Local SGD and its outer step are their matrix form; sums by messages are SGD over all ranks."""

import numpy as np
import pytest

from tests._matrix_form import EXACT, RATE, simulated, trained
from tests.parallel import parallel


@pytest.mark.cases(1)
@parallel(ranks=[4])
@pytest.mark.parametrize(
    ("every", "rate", "momentum"),
    [(2, 0.7, 0.9), (3, 1.0, 0.0)]
    + [
        pytest.param(every, *outer, marks=pytest.mark.long)
        for every in (1, 2, 3)
        for outer in ((1.0, 0.0), (0.7, 0.0), (0.7, 0.9))
        if (every, *outer) not in ((2, 0.7, 0.9), (3, 1.0, 0.0))
    ],
)
def test_local_steps_are_their_matrix_form(comm, every, rate, momentum):
    """The last round of three steps is not over: replicas differ."""
    anchor, moved = np.zeros(1), np.zeros(1)

    def update(x, gradients, step: int):
        nonlocal anchor, moved
        if step == 0:
            anchor, moved = x[0], np.zeros_like(x[0])
        x = x - RATE * gradients
        if (step + 1) % every:
            return x
        outer = anchor - x.mean(0)
        moved = momentum * moved + outer
        anchor = anchor - rate * (outer + momentum * moved)  # Nesterov's
        return np.tile(anchor, (comm.size, 1))

    changes = {
        **EXACT,
        "data_parallel.method": "local",
        "data_parallel.local_steps": every,
        "data_parallel.outer_learning_rate": rate,
        "data_parallel.outer_momentum": momentum,
    }
    expected, found = simulated(comm, changes, update), trained(comm, changes)
    assert np.abs(found - expected).max() < 1e-10
    assert (found == found[0]).all() == (every != 3)


@pytest.mark.long
@parallel(ranks=[4])
def test_sums_of_all_gradients_are_their_matrix_form(comm):
    def update(x, gradients, step: int):
        return x - RATE * gradients.mean(0)

    for method in ("all_reduce", "ring", "parameter_server"):
        changes = {**EXACT, "data_parallel.method": method}
        expected, found = simulated(comm, changes, update), trained(comm, changes)
        assert np.abs(found - expected).max() < 1e-10
        assert (found == found[0]).all()
