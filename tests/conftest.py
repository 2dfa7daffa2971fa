"""Settings that every test shares."""

import signal

import pytest
from hypothesis import settings

# Examples are drawn from a fixed seed, so that a red test is red for everybody; wall-clock limits
# per example would fail on a busy machine.
settings.register_profile("ptdmpi", deadline=None, derandomize=True)
settings.load_profile("ptdmpi")


def pytest_configure(config: pytest.Config) -> None:
    """End what mpirun started when a time limit outside ends pytest (`timeout`, a CI runner)."""
    signal.signal(signal.SIGTERM, _stop)


def _stop(number: int, frame: object) -> None:
    pytest.exit("ended by SIGTERM", returncode=128 + number)
