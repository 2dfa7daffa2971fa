"""The measured rounding of ring attention."""

import pytest
from mpi4py import MPI

from benchmarks.planning import ring_error
from tests.parallel import parallel


@parallel(ranks=[1, pytest.param(3, marks=pytest.mark.long)])
def test_a_ring_rounds_as_the_kernel_of_one_rank(comm):
    """In float32, compared with one rank in float64."""
    alone = ring_error.errors(MPI.COMM_SELF, 96)
    ring = ring_error.errors(comm, 96)
    assert list(ring) == ["output", "dq", "dk", "dv"]
    for name, error in ring.items():
        assert 1e-8 < error < 2 * alone[name] < 2e-6, (name, error, alone[name])
