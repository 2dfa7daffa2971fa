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
settings.register_profile("ptdmpi", deadline=None, derandomize=True, max_examples=40)
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


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as long the cases of each parametrised test that `make test` does not need."""
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if hasattr(item, "callspec") and not any(map(item.get_closest_marker, ("long", "slurm"))):
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for of_test in cases.values():
        marker = of_test[0].get_closest_marker("cases")
        short = covering(of_test)[: marker.args[0] if marker else None]
        for item in of_test:
            if item not in short:
                item.add_marker(pytest.mark.long)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> LoadScopeScheduling:
    """Return the scheduler of tests for pytest-xdist."""
    return ByRoom(config, log)


class ByRoom(LoadScopeScheduling):
    """A scheduler that gives all tests of a room to one worker."""

    def _split_scope(self, nodeid: str) -> str:
        return room_of(nodeid)


def covering(cases: list[pytest.Item]) -> list[pytest.Item]:
    """Return cases of one test that have each value of each of its parameters at least once.

    Each next case has as many new values as possible; of equals, the first one.
    """
    # by identity: a product of settings has each value as one object, and not all can be hashed
    left = {case: {(k, id(v)) for k, v in case.callspec.params.items()} for case in cases}
    chosen, missing = [], set().union(*left.values())
    while missing:
        best = max(left, key=lambda case: len(left[case] & missing))
        missing -= left.pop(best)
        chosen.append(best)
    return chosen


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
