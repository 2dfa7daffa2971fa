"""What was put in is found again."""

import pytest

from ptdmpi.plan.machine.fit import descend, distance, fit_rings


def test_rings_and_fractions_are_found_again():
    ranks, sizes = [2, 2, 4, 4, 8, 8], [1e4, 1e7, 1e4, 1e7, 1e4, 1e7]
    moved = [2 * (n - 1) / n * size for n, size in zip(ranks, sizes, strict=True)]
    times = [3e-5 + 2 * (n - 1) * 2e-6 + x / 2e11 for n, x in zip(ranks, moved, strict=True)]
    assert fit_rings(ranks, moved, times) == pytest.approx((3e-5, 2e-6, 2e11), rel=1e-6)
    wanted = [0.7, 0.3]
    found = descend(lambda tried: distance(zip(tried, wanted, strict=True)), [0.8, 0.8])
    assert found == pytest.approx(wanted, rel=2e-3)
