"""Settings that every test shares."""

import signal

import pytest
from hypothesis import settings

from tests import parallel

# Examples are drawn from a fixed seed, so that a red test is red for everybody; wall-clock limits
# per example would fail on a busy machine.
settings.register_profile("ptdmpi", deadline=None, derandomize=True)
settings.load_profile("ptdmpi")


def pytest_configure(config: pytest.Config) -> None:
    """End what mpirun started when a time limit outside ends pytest (`timeout`, a CI runner)."""
    signal.signal(signal.SIGTERM, _stop)


def _stop(number: int, frame: object) -> None:
    pytest.exit("ended by SIGTERM", returncode=128 + number)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """With --durations, also the parallel tests, each with its own time."""
    count = terminalreporter.config.option.durations
    lines = [] if count is None else parallel.slowest(terminalreporter.config, count)
    if lines:
        terminalreporter.section("slowest parallel tests")
        terminalreporter.write_line("\n".join(lines))
