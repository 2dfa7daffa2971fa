"""`python -m benchmarks.speed.start [--rounds 5]`: the time from mpirun to the end of the first
step, and the minimum that any trainer needs for this.

The measured run is the run of `make demo` (jobs/demo.toml, on the shards of `make demo`).
Alternating with it, the benchmark starts the same number of processes, which only import torch and
mpi4py. The minimum is the time of these imports, plus the time of a later step that the run has
recorded. A last line gives the processor time of a plan for 175B parameters, which must be below
10 s.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.launch import COMPILED, ROOT, mpirun, start

RANKS = 4
STEPS = 3
LIMIT_S = 120.0
PAUSE_S = 0.005
PLAN = ("--model", "gpt3-175b", "--cluster", "selene", "--ranks", "1024", "--batch", "1536")
PLAN_MOST_S = 10.0  # of one core


def imports_s() -> float:
    """Return the seconds until the last rank has imported torch and initialized MPI."""
    words = ["-c", "import torch; from mpi4py import MPI; print(flush=True)"]
    begin = time.perf_counter()
    process = start(mpirun(RANKS, words), subprocess.PIPE, extra=COMPILED)
    assert process.stdout is not None
    for _ in range(RANKS):
        process.stdout.readline()
    taken = time.perf_counter() - begin
    process.wait(LIMIT_S)
    return taken


def first_step_s() -> tuple[float, float]:
    """Return the seconds from mpirun until the first step is recorded, and the seconds of the last
    step."""
    with tempfile.TemporaryDirectory(prefix="ptdmpi-start-") as folder:
        settings = [f"run.dir={folder}/run", f"run.steps={STEPS}", "optimizer.warmup_steps=1"]
        words = [word for setting in settings for word in ("--set", setting)]
        command = mpirun(RANKS, ["-m", "ptdmpi", "train", str(ROOT / "jobs/demo.toml"), *words])
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
        return first, [step["step_time_s"] for step in steps if "loss" in step][-1]


def plan_s() -> float:
    """Return the processor time of `ptdmpi plan` for 175B parameters, in seconds. Processor time
    hardly depends on other programs, unlike the time on the clock."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "ptdmpi", "plan", *PLAN]
    subprocess.run(command, stdout=subprocess.DEVNULL, cwd=ROOT, timeout=LIMIT_S, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    """Measure the run and the imports alternately, and print each round and the median. Then print
    the time of a plan."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    shares = []
    for number in range(options.rounds + 1):
        bare = imports_s()
        first, step = first_step_s()
        shares.append(first / (bare + step))
        # leave out the first round, which reads its files from the disk
        warm = "" if number else " (not counted)"
        print(f"first step {first:.2f} s, imports {bare:.2f} s, a step {step:.3f} s{warm}")
    counted = shares[1:]
    print(
        f"{RANKS} ranks: the first step ends after {statistics.median(counted):.2f} times "
        f"imports and a step ({min(counted):.2f} to {max(counted):.2f})"
    )
    print(f"plan 175B on selene: {plan_s():.1f} s of a core (must be below {PLAN_MOST_S:.0f} s)")


if __name__ == "__main__":
    main()
