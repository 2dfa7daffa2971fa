"""Run programs and test functions under mpirun.

`mpirun(ranks, args)` starts one program. `@parallel(ranks=[1, 2, 4, 8])` makes a test of a function
that every rank calls with the world communicator:

    @parallel(ranks=[1, 2, 4])
    @pytest.mark.parametrize("size", [1, 1000])
    def test_sum(comm, size):
        assert comm.allreduce(size) == size * comm.size

Besides `comm`, the function takes parametrised arguments (any picklable values) and `tmp_path`, one
folder for all ranks. Other fixtures live in the pytest process and do not reach the ranks.

Starting N interpreters that import torch takes seconds, so all selected tests at one number of
ranks share one mpirun, and each is still reported as its own pytest item. A failure ends all ranks;
the tests behind it get a new mpirun.
"""

import contextlib
import dataclasses
import functools
import inspect
import json
import pickle
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests._mpirun import (
    ROOT,
    MpirunError,
    MpirunTimeout,
    command_of,
    launch,
    mpi_environment,
    mpirun,
)

__all__ = ["ROOT", "MpirunError", "MpirunTimeout", "mpi_environment", "mpirun", "parallel"]

STARTUP_LIMIT_S = 120.0  # until every rank has imported the test module, on a busy machine
MANY = 4  # more ranks than this take most of a minute to start on two cores
SECONDS = "seconds on the slowest rank"  # a property of a parallel test's report
NO_TIME = "no time was left for it"


def parallel(ranks: Sequence[int], *, limit_s: float = 60.0) -> Callable[[Callable], Callable]:
    """Make a pytest test of a module-level function `test_x(comm, ...)` for each number of ranks.

    A rank that takes longer than `limit_s` fails the test, with the stacks of all ranks. Numbers
    above MANY are run by `make test-long`.
    """

    def decorate(function: Callable) -> Callable:
        if function.__qualname__ != function.__name__:
            raise TypeError(f"{function.__qualname__}: only functions of a module run in parallel")
        own = inspect.signature(function).parameters.values()
        if [p.name for p in own][:1] != ["comm"]:
            raise TypeError(f"{function.__name__}: the first argument must be `comm`")

        @functools.wraps(function)
        def run(request: pytest.FixtureRequest, ranks: int, **_: object) -> None:
            _run_item(request, ranks)

        fixed = [
            inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD)
            for name in ("request", "ranks")
        ]
        passed = [p for p in own if p.name not in ("comm", "tmp_path")]
        run.__signature__ = inspect.Signature([*fixed, *passed])
        run.parallel_body = function
        run.parallel_limit_s = limit_s
        return pytest.mark.parametrize("ranks", [_marked(one) for one in ranks])(run)

    return decorate


def _marked(ranks: object) -> object:
    """A number of ranks (or a pytest.param of one), marked: several of them use all cores together,
    and take long above MANY."""
    plain = ranks if isinstance(ranks, int) else ranks.values[0]
    marks = [] if isinstance(ranks, int) else list(ranks.marks)
    if plain > 1:
        marks.append(pytest.mark.together)
    if plain > MANY and isinstance(ranks, int):
        marks.append(pytest.mark.long)
    return pytest.param(plain, marks=marks)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How one test ended: `kind` is passed, failed or skipped; `text` is what all ranks wrote."""

    kind: str
    text: str
    seconds: float = 0.0  # in the test itself, on the slowest rank


_OUTCOMES = pytest.StashKey[dict[str, Outcome]]()


def _run_item(request: pytest.FixtureRequest, ranks: int) -> None:
    """Report the outcome of one pytest item, running it and its later siblings if need be."""
    outcomes = request.config.stash.setdefault(_OUTCOMES, {})
    item = request.node
    _check_arguments(item)
    if item.nodeid not in outcomes:
        waiting = request.session.items[request.session.items.index(item) + 1 :]
        batch = [item, *(other for other in waiting if _runs_with(other, item, ranks))]
        until = getattr(item.config.option, "until", None)
        for other, outcome in zip(batch, _run_batch(ranks, batch, until), strict=False):
            outcomes[other.nodeid] = outcome
    outcome = outcomes.pop(item.nodeid)
    item.user_properties.append((SECONDS, outcome.seconds))
    if outcome.kind == "failed":
        pytest.fail(outcome.text, pytrace=False)
    if outcome.kind == "skipped":
        pytest.skip(outcome.text)
    print(outcome.text)


def _runs_with(other: pytest.Item, item: pytest.Function, ranks: int) -> bool:
    """Whether `other` can share the mpirun of `item`."""
    body = getattr(getattr(other, "obj", None), "parallel_body", None)
    return (
        body is not None
        and other.callspec.params["ranks"] == ranks
        # a module that changes its process (`PROCESS` says how) shares it with its like alone
        and getattr(other.module, "PROCESS", "") == getattr(item.module, "PROCESS", "")
        and not _foreign_arguments(other)
    )


def _foreign_arguments(item: pytest.Function) -> list[str]:
    known = {"comm", "tmp_path", *item.callspec.params}
    wanted = inspect.signature(item.obj.parallel_body).parameters
    return [name for name in wanted if name not in known]


def _check_arguments(item: pytest.Function) -> None:
    if foreign := _foreign_arguments(item):
        pytest.fail(
            f"{', '.join(foreign)}: a parallel test has comm, tmp_path and parameters only",
            pytrace=False,
        )


def _run_batch(ranks: int, batch: Sequence[pytest.Function], until: float | None) -> list[Outcome]:
    """Run tests under one mpirun: their outcomes, up to the first failure. None begins after the
    time `until`."""
    with tempfile.TemporaryDirectory(prefix="ptdmpi-tests-") as folder:
        place = Path(folder)
        tests = [_describe(item, place / f"tmp{i}") for i, item in enumerate(batch)]
        job = {"path": sys.path, "tests": tests, "until": until, "late": NO_TIME}
        (place / "job.pickle").write_bytes(pickle.dumps(job))
        limits_s = [item.obj.parallel_limit_s for item in batch]
        error = ""
        try:
            launch(
                command_of(ranks, [str(ROOT / "tests" / "parallel_worker.py"), folder]),
                env={},
                cwd=None,
                check=True,
                overdue=_Watch(place, ranks, limits_s),
            )
        except MpirunError as failure:
            error = str(failure)
        return _outcomes(place, ranks, len(batch), error)


def _describe(item: pytest.Function, tmp_path: Path) -> tuple[str, str, str, bytes]:
    """Name and file of the module, name of the test function, and the arguments that the ranks call
    it with (pickled by themselves, for their types may be the module's)."""
    arguments = {k: v for k, v in item.callspec.params.items() if k != "ranks"}
    if "tmp_path" in inspect.signature(item.obj.parallel_body).parameters:
        tmp_path.mkdir()
        arguments["tmp_path"] = tmp_path
    name = item.obj.parallel_body.__name__
    return item.module.__name__, str(item.path), name, pickle.dumps(arguments)


def _events(place: Path, rank: int) -> list[dict]:
    """What rank `rank` has reported so far; a last line that is still being written is left out."""
    file = place / f"rank{rank}.jsonl"
    lines = file.read_text().split("\n")[:-1] if file.exists() else []
    return [json.loads(line) for line in lines]


class _Watch:
    """Says when the test that is running, or the start-up before it, has overrun its limit."""

    def __init__(self, place: Path, ranks: int, limits_s: Sequence[float]) -> None:
        self.limits_s = limits_s
        self.files = [place / f"rank{rank}.jsonl" for rank in range(ranks)]
        self.sizes = [0] * ranks  # of what has been read of each: it is asked ten times a second
        self.test, self.since = -1, time.monotonic()

    def __call__(self) -> str | None:
        newest = max(self._newest(rank) for rank in range(len(self.files)))
        if newest > self.test:
            self.test, self.since = newest, time.monotonic()
        limit_s = STARTUP_LIMIT_S if self.test < 0 else self.limits_s[self.test]
        if time.monotonic() - self.since <= limit_s:
            return None
        return f"time limit of {limit_s:g} s" + (" of the start-up" if self.test < 0 else "")

    def _newest(self, rank: int) -> int:
        """The test of the last whole line that a rank has reported since it was asked, or -1."""
        with contextlib.suppress(FileNotFoundError), open(self.files[rank], "rb") as file:
            file.seek(self.sizes[rank])
            lines, end, _ = file.read().rpartition(b"\n")
            if end:
                self.sizes[rank] += len(lines) + 1
                return json.loads(lines.rpartition(b"\n")[2])["test"]
        return -1


def _outcomes(place: Path, ranks: int, count: int, error: str) -> list[Outcome]:
    """Outcomes in order, ending with the first test that not every rank has finished well."""
    events = [_events(place, rank) for rank in range(ranks)]
    outcomes = []
    for test in range(count):
        ends = [_end(of_rank, test) for of_rank in events]
        kinds = {end["kind"] for end in ends}
        if len(kinds) == 1 and kinds <= {"passed", "skipped"}:
            kind = kinds.pop()
            # A skip is the same on all ranks: its reason is wanted once, as one line.
            text = ends[0]["reason"] if kind == "skipped" else _output(place, events, test)
            seconds = max(end["seconds"] for end in ends)
            outcomes.append(Outcome(kind, text, seconds))
            continue
        states = ", ".join(f"rank {rank}: {end['kind']}" for rank, end in enumerate(ends))
        text = "\n".join([states, _output(place, events, test), error])
        outcomes.append(Outcome("failed", text))
        return outcomes
    if error:  # every test passed, then a rank died: nobody else would report it
        outcomes[-1] = Outcome("failed", f"after the last test: {error}")
    return outcomes


def _end(events_of_rank: list[dict], test: int) -> dict:
    """How a rank ended a test."""
    ends = (e for e in events_of_rank if e["test"] == test and e["kind"] != "start")
    return next(ends, {"kind": "unfinished"})


def _output(place: Path, events: list[list[dict]], test: int) -> str:
    """What each rank wrote while it ran one test (and, for the first, while it started)."""
    parts = []
    for rank, of_rank in enumerate(events):
        file = place / f"rank{rank}.txt"
        if not file.exists():
            continue
        starts = {e["test"]: e["offset"] for e in of_rank if e["kind"] == "start"}
        begin = starts.get(test, 0) if test else 0
        written = file.read_bytes()[begin : starts.get(test + 1)].decode(errors="replace").strip()
        if written:
            rule = "-" * 16
            parts.append(f"{rule} rank {rank} of {len(events)} {rule}\n{written}")
    return "\n".join(parts)
