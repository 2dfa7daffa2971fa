"""One rank under `mpirun python parallel_worker.py FOLDER`, see parallel.py.

It reads the job from FOLDER, redirects its output to rankR.txt, and appends to rankR.jsonl one line
when a test starts and one when it has ended.
"""

import importlib.util
import json
import os
import pickle
import reprlib
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

ABORT_DELAY_S = 0.5  # the other ranks report the same failure before all are ended


def main() -> None:
    """Run the tests of the job, up to the first failure, which ends all ranks."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    place = Path(sys.argv[1])
    output = os.open(place / f"rank{world.rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)  # file descriptors: for C libraries and faulthandler, too
    os.dup2(output, 2)
    sys.stdout.reconfigure(line_buffering=True)  # to show what was printed before a hang
    test = -1
    try:
        # parallel.py wrote this file a moment ago; with pickle, parameters may be any value
        job = pickle.loads((place / "job.pickle").read_bytes())
        sys.path[:] = job["path"]
        with open(place / f"rank{world.rank}.jsonl", "w", buffering=1) as events:
            world.Barrier()
            for test, (module, file, name, arguments) in enumerate(job["tests"]):
                _load(module, Path(file))
                offset = _flush_and_tell()
                _report(events, test=test, kind="start", offset=offset)
                since = time.monotonic()
                body = getattr(sys.modules[module], name).parallel_body
                if _is_late(world, job["until"]):
                    _report(events, test=test, kind="skipped", reason=job["late"], seconds=0.0)
                    continue
                try:
                    end = _call(body, world.Dup(), pickle.loads(arguments))
                except BaseException:
                    _report(events, test=test, kind="failed")
                    raise
                _report(events, test=test, seconds=time.monotonic() - since, **end)
                world.Barrier()  # a rank that is ahead must not count as hung in the next test
    except BaseException as error:
        where = "start-up" if test < 0 else job["tests"][test][2]
        print(f"rank {world.rank} of {world.size} failed in {where}:", file=sys.stderr)
        try:
            traceback.print_exception(error)
            _print_locals(error)
            _flush_and_tell()
            time.sleep(ABORT_DELAY_S)
        finally:
            world.Abort(1)


def _load(name: str, file: Path) -> None:
    """Import a test module under pytest's name for it, because pickled values refer to that."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, file)
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])


def _is_late(world: object, until: float | None) -> bool:
    """Return True on all ranks if the time is up by the clock of rank 0."""
    return until is not None and world.bcast(time.time() > until)


def _call(body: Callable, comm: object, arguments: dict[str, object]) -> dict[str, str]:
    """Run a test; its own communicator keeps stray messages away from the next test."""
    import pytest

    try:
        body(comm, **arguments)
    except pytest.skip.Exception as skipped:
        return {"kind": "skipped", "reason": str(skipped)}
    return {"kind": "passed"}


def _report(events: object, **event: object) -> None:
    """Write an event as one line of JSON."""
    events.write(json.dumps(event) + "\n")


def _flush_and_tell() -> int:
    """Flush Python's buffers; return the size of this rank's output so far in bytes."""
    sys.stdout.flush()
    sys.stderr.flush()
    return os.fstat(1).st_size


def _print_locals(error: BaseException) -> None:
    """Print the variables of the test's frame, below `_call`: a plain assert shows no values."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    names = [frame.f_code.co_name for frame in frames]
    shorten = reprlib.Repr()
    shorten.maxstring = shorten.maxother = 400
    if "_call" in names[:-1]:
        for name, value in frames[names.index("_call") + 1].f_locals.items():
            print(f"    {name} = {shorten.repr(value)}", file=sys.stderr)


main()
