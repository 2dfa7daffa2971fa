"""`python -m benchmarks.speed.start [--ranks 4] [--rounds 5]`: from mpirun to the end of the first
step, beside what no trainer can do without.

The run is `make demo`'s (jobs/demo.toml, on shards that `make demo` has made). Beside it, in turn:
so many processes that import torch and mpi4py, and nothing else. One step more is the least, and
is taken from the run's own records.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.launch import COMPILED, ROOT, mpirun, start

STEPS, LIMIT_S, PAUSE_S = 3, 120.0, 0.005


def imports_s(ranks: int) -> float:
    """Seconds until the last of them has imported torch and begun MPI."""
    words = ["-c", "import torch; from mpi4py import MPI; print(flush=True)"]
    begin = time.perf_counter()
    process = start(mpirun(ranks, words), subprocess.PIPE, extra=COMPILED)
    assert process.stdout is not None
    for _ in range(ranks):
        process.stdout.readline()
    taken = time.perf_counter() - begin
    process.wait(LIMIT_S)
    return taken


def first_step_s(ranks: int) -> tuple[float, float]:
    """Seconds from mpirun to the record of the first step, and those of the last step."""
    with tempfile.TemporaryDirectory(prefix="ptdmpi-start-") as folder:
        given = [f"run.dir={folder}/run", f"run.steps={STEPS}", "optimizer.warmup_steps=1"]
        words = [word for one in given for word in ("--set", one)]
        command = mpirun(ranks, ["-m", "ptdmpi", "train", str(ROOT / "jobs/demo.toml"), *words])
        records = Path(folder) / "run" / "metrics.jsonl"
        with open(Path(folder) / "log.txt", "w+", encoding="utf-8") as log:
            begin = time.perf_counter()
            process = start(command, log, extra=COMPILED)
            while not (records.exists() and b"\n" in records.read_bytes()):
                if process.poll() is not None or time.perf_counter() - begin > LIMIT_S:
                    log.seek(0)
                    sys.exit(f"no first step:\n{log.read()}")
                time.sleep(PAUSE_S)
            first = time.perf_counter() - begin
            process.wait(LIMIT_S)
        steps = [json.loads(line) for line in records.read_text().splitlines()]
        return first, [one["step_time_s"] for one in steps if "loss" in one][-1]


def main() -> None:
    """Measure in turn, and print each round and the median."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    shares = []
    for number in range(given.rounds + 1):
        bare = imports_s(given.ranks)
        first, step = first_step_s(given.ranks)
        shares.append(first / (bare + step))
        warm = "" if number else " (not counted)"  # files come from the disk
        print(f"first step {first:.2f} s, imports {bare:.2f} s, a step {step:.3f} s{warm}")
    counted = shares[1:]
    print(
        f"{given.ranks} ranks: the first step ends after {statistics.median(counted):.2f} times "
        f"imports and a step ({min(counted):.2f} to {max(counted):.2f})"
    )


if __name__ == "__main__":
    main()
