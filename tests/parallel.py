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
the tests after it get a new mpirun.
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
from collections.abc import Callable, Container, Iterable, Sequence
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

__all__ = ["ROOT", "MpirunError", "MpirunTimeout", "mpi_environment", "mpirun", "names", "parallel"]

STARTUP_LIMIT_S = 120.0  # until every rank has imported the test module, on a busy machine
MANY = 4  # more ranks than this take most of a minute to start on two cores
SECONDS = "seconds on the slowest rank"  # a property of a parallel test's report
NO_TIME = "no time was left for it"


def parallel(ranks: Sequence[int], *, limit_s: float = 60.0) -> Callable[[Callable], Callable]:
    """Return a decorator that makes `test_x(comm, ...)` a pytest test for each number of ranks.

    The function must be at module level. A rank that takes longer than `limit_s` fails the test,
    with the stacks of all ranks. `make test-long` runs the tests on more than MANY ranks.
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


def names(rows: Iterable[str], *, short: Container[str]) -> pytest.MarkDecorator:
    """Return the decorator that calls a test for the `name` of each row. `make test-long` runs the
    rows that are not in `short`."""
    return pytest.mark.parametrize(
        "name",
        [pytest.param(name, marks=() if name in short else pytest.mark.long) for name in rows],
    )


def _marked(ranks: object) -> object:
    """Return a number of ranks (or a pytest.param of one) as a marked parameter.

    Several ranks use all cores together; more than MANY take long.
    """
    plain = ranks if isinstance(ranks, int) else ranks.values[0]
    marks = [] if isinstance(ranks, int) else list(ranks.marks)
    if plain > 1:
        marks.append(pytest.mark.together)
    if plain > MANY and isinstance(ranks, int):
        marks.append(pytest.mark.long)
    return pytest.param(plain, marks=marks)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The end of one test: `kind` is passed, failed or skipped, `text` the output of all ranks."""

    kind: str
    text: str
    seconds: float = 0.0  # in the test itself, on the slowest rank


_OUTCOMES = pytest.StashKey[dict[str, Outcome]]()


def _run_item(request: pytest.FixtureRequest, ranks: int) -> None:
    """Report the outcome of a pytest item; run it first, together with later ones, if need be."""
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
    """Return True if `other` can share the mpirun of `item`."""
    body = getattr(getattr(other, "obj", None), "parallel_body", None)
    return (
        body is not None
        and other.callspec.params["ranks"] == ranks
        # a module that changes its process, as `PROCESS` says, or the environment of its ranks
        # (`ENVIRONMENT`) shares it with its like alone
        and getattr(other.module, "PROCESS", "") == getattr(item.module, "PROCESS", "")
        and not _foreign_arguments(other)
    )


def _foreign_arguments(item: pytest.Function) -> list[str]:
    """Return the arguments of a test that the ranks cannot get."""
    known = {"comm", "tmp_path", *item.callspec.params}
    wanted = inspect.signature(item.obj.parallel_body).parameters
    return [name for name in wanted if name not in known]


def _check_arguments(item: pytest.Function) -> None:
    """Fail the test if it asks for arguments that the ranks cannot get."""
    if foreign := _foreign_arguments(item):
        pytest.fail(
            f"{', '.join(foreign)}: a parallel test has comm, tmp_path and parameters only",
            pytrace=False,
        )


def _run_batch(ranks: int, batch: Sequence[pytest.Function], until: float | None) -> list[Outcome]:
    """Run tests under one mpirun and return their outcomes, up to the first failure.

    No test begins after the time `until`.
    """
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
                env=getattr(batch[0].module, "ENVIRONMENT", {}),
                cwd=None,
                check=True,
                overdue=_Watch(place, ranks, limits_s),
            )
        except MpirunError as failure:
            error = str(failure)
        return _outcomes(place, ranks, len(batch), error)


def _describe(item: pytest.Function, tmp_path: Path) -> tuple[str, str, str, bytes]:
    """Return the name and the file of the module, the name of the test, and its arguments.

    The arguments are pickled on their own, because their types may be defined in the module.
    """
    arguments = {k: v for k, v in item.callspec.params.items() if k != "ranks"}
    if "tmp_path" in inspect.signature(item.obj.parallel_body).parameters:
        tmp_path.mkdir()
        arguments["tmp_path"] = tmp_path
    name = item.obj.parallel_body.__name__
    return item.module.__name__, str(item.path), name, pickle.dumps(arguments)


def _events(place: Path, rank: int) -> list[dict]:
    """Return the reports of a rank so far, without a last line that it is still writing."""
    file = place / f"rank{rank}.jsonl"
    lines = file.read_text().split("\n")[:-1] if file.exists() else []
    return [json.loads(line) for line in lines]


class _Watch:
    """The time limit of the running test, or of the start-up before the first one.

    A call returns the reason if the limit has passed, else None.
    """

    def __init__(self, place: Path, ranks: int, limits_s: Sequence[float]) -> None:
        self.limits_s = limits_s
        self.files = [place / f"rank{rank}.jsonl" for rank in range(ranks)]
        self.sizes = [0] * ranks  # bytes read of each file: this is called ten times a second
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
        """Return the test of a rank's newest whole line since the last call, or -1."""
        with contextlib.suppress(FileNotFoundError), open(self.files[rank], "rb") as file:
            file.seek(self.sizes[rank])
            lines, end, _ = file.read().rpartition(b"\n")
            if end:
                self.sizes[rank] += len(lines) + 1
                return json.loads(lines.rpartition(b"\n")[2])["test"]
        return -1


def _outcomes(place: Path, ranks: int, count: int, error: str) -> list[Outcome]:
    """Return the outcomes in order, up to the first test that some rank has not finished well."""
    events = [_events(place, rank) for rank in range(ranks)]
    outcomes = []
    for test in range(count):
        ends = [_end(of_rank, test) for of_rank in events]
        kinds = {end["kind"] for end in ends}
        if len(kinds) == 1 and kinds <= {"passed", "skipped"}:
            kind = kinds.pop()
            # a skip is the same on all ranks, so its reason is printed once
            text = ends[0]["reason"] if kind == "skipped" else _output(place, events, test)
            seconds = max(end["seconds"] for end in ends)
            outcomes.append(Outcome(kind, text, seconds))
            continue
        states = ", ".join(f"rank {rank}: {end['kind']}" for rank, end in enumerate(ends))
        text = "\n".join([states, _output(place, events, test), error])
        outcomes.append(Outcome("failed", text))
        return outcomes
    if error:  # every test passed, then a rank died: only this reports it
        outcomes[-1] = Outcome("failed", f"after the last test: {error}")
    return outcomes


def _end(events_of_rank: list[dict], test: int) -> dict:
    """Return a rank's report of the end of a test."""
    ends = (e for e in events_of_rank if e["test"] == test and e["kind"] != "start")
    return next(ends, {"kind": "unfinished"})


def _output(place: Path, events: list[list[dict]], test: int) -> str:
    """Return the output of each rank during a test; for the first test, since its start, too."""
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
