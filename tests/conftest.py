"""Settings and hooks of pytest for all tests."""

import ast
import functools
import re
import signal
import time

import pytest
from hypothesis import settings
from xdist.scheduler import LoadScopeScheduling

from tests import parallel

# A fixed seed draws the examples, so that a failing test fails for everybody. A time limit for each
# example would fail on a busy machine.
settings.register_profile("ptdmpi", deadline=None, derandomize=True)
settings.load_profile("ptdmpi")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option --until."""
    parser.addoption(
        "--until", type=float, help="no test begins after this time (seconds since 1970)"
    )


def pytest_configure(config: pytest.Config) -> None:
    """End the programs under mpirun, too, when SIGTERM ends pytest (`timeout`, a CI runner)."""
    signal.signal(signal.SIGTERM, _stop)


def _stop(number: int, frame: object) -> None:
    pytest.exit("ended by SIGTERM", returncode=128 + number)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> LoadScopeScheduling:
    """Return the scheduler of tests for pytest-xdist."""
    return ByRoom(config, log)


class ByRoom(LoadScopeScheduling):
    """A scheduler that gives all tests of a room to one worker."""

    def _split_scope(self, nodeid: str) -> str:
        return room_of(nodeid)


def room_of(nodeid: str) -> str:
    """Return the room of a test: one worker runs all tests of a room.

    Tests that start programs under mpirun share one room, so that no two of them run several ranks
    at once. Parallel tests of one rank share another. All other tests are grouped by file, for the
    sake of their fixtures.
    """
    file, _, name = nodeid.partition("::")
    of_ranks, starts_ranks = _kinds(file)
    if name.partition("[")[0] in of_ranks:
        return "one rank"
    return "mpirun" if starts_ranks else file


@functools.cache
def _kinds(file: str) -> tuple[set[str], bool]:
    """Return the names of a file's parallel tests, and whether the file starts ranks itself."""
    text = (parallel.ROOT / file).read_text(encoding="utf-8")
    of_ranks = {
        node.name
        for node in ast.parse(text).body
        if isinstance(node, ast.FunctionDef)
        and any(ast.unparse(one).startswith("parallel(") for one in node.decorator_list)
    }
    return of_ranks, re.search(r"\bmpirun\b|tests\._killed", text) is not None


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test of one process after the time --until; the ranks skip their tests themselves."""
    until = item.config.option.until
    if until is not None and time.time() > until and not hasattr(item.obj, "parallel_body"):
        pytest.skip(parallel.NO_TIME)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the slowest parallel tests if --durations is given.

    pytest's own list counts the time of a whole mpirun for its first test.
    """
    stats = terminalreporter.stats
    reports = [report for kind in ("passed", "failed") for report in stats.get(kind, ())]
    seconds = {r.nodeid: s for r in reports if (s := dict(r.user_properties).get(parallel.SECONDS))}
    count = terminalreporter.config.option.durations
    if count is not None and seconds:
        ranked = sorted(seconds, key=lambda name: -seconds[name])[: count or None]
        terminalreporter.section("slowest parallel tests")
        terminalreporter.write_line("\n".join(f"{seconds[name]:6.2f}s {name}" for name in ranked))
