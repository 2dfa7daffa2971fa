"""`make gpu-dry`: build the null GPU, count training steps on it, and write the
tables of docs/reference/gpu-dry.md.

Each part runs in a separate process, in the environment of the null GPU.
"""

import argparse
import datetime
import importlib.metadata
import json
import re
import sys
from collections.abc import Iterator
from typing import Any

from benchmarks.dry.bounds import missed
from benchmarks.dry.build import TORCH, build, environment
from benchmarks.gpu.identity import identity
from benchmarks.gpu.process import answer
from benchmarks.gpu.reasons import done, reasons
from benchmarks.launch import ROOT, mpirun
from benchmarks.marks import put, table
from benchmarks.speed.peers import PINS, install
from ptdmpi.base import launched
from ptdmpi.comm import launch

PAGE = ROOT / "docs/reference/gpu-dry.md"
LIMIT_S = 600.0  # time limit for one part, in seconds
# part -> number of ranks
PARTS = {
    "layers": 1,
    "operators": 1,
    "host": 1,
    "kinds": 1,
    "two ranks": 2,
    "messages": 2,
    "make gpu": 1,
}


def of_part(name: str) -> Iterator[dict[str, Any]]:
    """Run a part on the null GPU: count launches, bytes and FLOPs for each row of the part's table
    (such as a kind of training). After each row, yield all rows that are finished so far. This
    process must have the environment of the null GPU."""
    from benchmarks.dry import host, kinds, layers, measurement, messages, operators
    from benchmarks.gpu.timing import measured_rows

    rows = {
        "layers": layers.rows,
        "operators": operators.rows,
        "host": host.rows,
        "kinds": kinds.rows,
        "two ranks": kinds.rows_of_two,
        "messages": messages.rows,
        "make gpu": measurement.rows,
    }
    yield from measured_rows(rows[name]())


def main() -> None:
    """Count all parts, and write their tables into the page. With the option --part, count only
    this part, and print its rows for the parent process. The exit code is 1 if a row could not be
    counted or exceeds a bound (see `bounds.missed`)."""
    launch.prepare()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", choices=PARTS, help="count one part and print its rows")
    chosen = parser.parse_args()
    if chosen.part:
        for rows in of_part(chosen.part):
            if launched.launched_rank() == 0:
                print(json.dumps(rows), flush=True)
        return
    build()
    install("torchtitan")
    put(PAGE, "counted", [counted_with()])
    failed = {}
    for name, ranks in PARTS.items():
        command = [sys.executable, "-m", "benchmarks.dry.run", "--part", name]
        if ranks > 1:
            command = mpirun(ranks, command[1:])
        rows = answer(command, LIMIT_S, environment())
        whys = missed(rows) | reasons(rows)
        failed |= {f"{name}: {where or 'as a whole'}": why for where, why in whys.items()}
        put(PAGE, name, lines(rows))
    for where, why in failed.items():
        print(f"{where}: {why}", file=sys.stderr)
    sys.exit(bool(failed))


def counted_with() -> str:
    """Return the sentence of the page that says when, at which commit, and with which packages the
    numbers were counted."""
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    others = f"transformers {importlib.metadata.version('transformers')}"
    packages = ", ".join([*TORCH, others, *PINS["torchtitan"][:1]])
    packages = re.sub("==+", " ", packages)
    return f"Counted on {today}, commit {identity()['commit']}, with {packages}."


def lines(rows: dict[str, Any]) -> list[str]:
    """Return the lines of the table of a part. Rows that failed are left out."""
    whole = {name: row for name, row in rows.items() if isinstance(row, dict) and done(row)}
    columns = list(dict.fromkeys(column for row in whole.values() for column in row))
    cells = ([name, *(_shown(row.get(key)) for key in columns)] for name, row in whole.items())
    return list(table(["", *columns], cells))


def _shown(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.3g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
