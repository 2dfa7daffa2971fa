"""The speed of saving and loading checkpoints, compared with plain writes and reads of the same
bytes, and with torch.distributed.checkpoint.

    python -m benchmarks.faults.checkpoint [--layers 3] [--rounds 5] [--folder DIR]

The three methods alternate in the same processes, on the same file system, in changing order, and
every ratio compares two times of the same round. The method "plain" writes a rank's part of the
state from one buffer with one fsync, and reads the same files into one buffer. Before each reading,
the files are synced and removed from the page cache (posix_fadvise DONTNEED).
"""

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from benchmarks.launch import answer
from benchmarks.turns import round_of, spread
from ptdmpi.comm import launch

SIDES = ("ours", "plain", "torch")
RANKS = 2
LIMIT_S = 1800.0


class Rank:
    """One rank of the benchmark, which saves and loads the same state by all three methods."""

    def __init__(self, layers: int, folder: Path) -> None:
        from ptdmpi.comm.world import World

        world = World()
        import torch
        import torch.distributed as dist

        from ptdmpi.checkpoint.save import Checkpoints
        from ptdmpi.config import Layout, synthetic_config
        from ptdmpi.engine.engine import Engine
        from ptdmpi.lineage.course import Course
        from ptdmpi.lineage.trained_on import synthetic
        from ptdmpi.plan.layout.grid import training_grid

        torch.set_num_threads(1)
        shape = {"layers": layers, "hidden": 1024, "heads": 16, "seq_length": 64}
        config = synthetic_config(Layout(1, 1, world.size), shape)
        engine = Engine(config, world.split(training_grid(data=world.size)), 4096)
        self.folder = folder
        self.world = world
        self.control = world.control
        state = engine.state

        def checkpoints_in(name: str, asynchronous: bool) -> Checkpoints:
            own = engine.config.replace("checkpoint", keep=1, asynchronous=asynchronous)
            return Checkpoints(folder / name, state, engine.axes, Course(own, synthetic(own)))

        self.checkpoints = checkpoints_in("ours", asynchronous=False)
        self.background = checkpoints_in("background", asynchronous=True)
        self.state = {
            f"{kind}/{name}": state.view(kind, name).detach()
            for name in engine.buffer.entries
            for kind in state.kinds
        }
        for tensor in self.state.values():
            tensor.normal_()
        self.bytes = self.checkpoints.state_bytes
        self.share = torch.randn(self.bytes // 4 // world.size).numpy()
        self.target = memoryview(bytearray(max(self.share.nbytes + 4096, 1)))
        dist.init_process_group(
            "gloo", f"file://{folder}/store", rank=world.rank, world_size=world.size
        )

    def save(self, side: str, number: int) -> None:
        """Save the state by the method `side`, in round `number`."""
        if side == "ours":
            self.checkpoints.save(number)
        elif side == "plain":
            (self.folder / "plain").mkdir(exist_ok=True)
            with open(self.folder / f"plain/{self.world.rank}", "wb", buffering=0) as file:
                data = memoryview(self.share).cast("B")
                done = 0
                while done < len(data):
                    done += file.write(data[done:])
                os.fsync(file.fileno())
        else:
            import torch.distributed.checkpoint as dcp

            dcp.save(self.state, checkpoint_id=self.folder / f"torch-{number}")

    def load(self, side: str, number: int) -> None:
        """Load the files that `save` wrote by method `side` in round `number`."""
        if side == "ours":
            self.checkpoints.resume("auto")
        elif side == "plain":
            for rank in range(self.world.size):
                with open(self.folder / f"plain/{rank}", "rb", buffering=0) as file:
                    while file.readinto(self.target):
                        continue
        else:
            import torch.distributed.checkpoint as dcp

            dcp.load(self.state, checkpoint_id=self.folder / f"torch-{number}")

    def forget(self) -> None:
        """Remove all saved files from the page cache."""
        for path in self.folder.rglob("*"):
            if path.is_file():
                descriptor = os.open(path, os.O_RDONLY)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(descriptor)

    def clock(self, work: Callable[[], None]) -> float:
        """Let all ranks start `work` together, and return the seconds until the last rank has
        finished."""
        self.control.Barrier()
        begin = time.perf_counter()
        work()
        self.control.Barrier()
        return time.perf_counter() - begin

    def load_cold(self, side: str, number: int) -> float:
        """Return the seconds of a load by the method `side`, in round `number`, from files that are
        not in the page cache."""
        self.forget()
        return self.clock(partial(self.load, side, number))

    def round(self, number: int) -> dict[str, dict[str, float]]:
        """Return the seconds of saving and loading by each method, and the time for which an
        asynchronous save stops training."""
        saves = {side: partial(self.clock, partial(self.save, side, number)) for side in SIDES}
        loads = {side: partial(self.load_cold, side, number) for side in SIDES}
        times = {"save_s": round_of(saves, number), "load_s": round_of(loads, number)}
        begin = time.perf_counter()
        self.background.save(number)
        stall_s = time.perf_counter() - begin
        self.background.finish()
        times["background"] = {"stall_s": max(self.control.allgather(stall_s))}
        if self.world.rank == 0:
            shutil.rmtree(self.folder / f"torch-{number}")
        self.control.Barrier()
        return times


def run_rank(layers: int, rounds: int, folder: Path) -> None:
    """Measure saving and loading on one rank, in `rounds` rounds. The first rank prints the results
    as JSON."""
    launch.prepare()
    rank = Rank(layers, folder)
    times = [rank.round(number) for number in range(rounds + 1)]
    if rank.world.rank == 0:
        # leave out the first round, which is a warm-up
        print(json.dumps({"bytes": rank.bytes, "rounds": times[1:]}))


def table(results: dict) -> str:
    """Return a table, as text, of the results that `run_rank` has printed."""
    rounds = results["rounds"]
    size = results["bytes"]
    lines = [
        f"state of {size / 1e6:,.0f} MB; medians of {len(rounds)} rounds (least to greatest)",
        f"{'':6} {'GB/s':>5} {'plain':>6} {'torch':>6}   {'ratio to plain':22} ratio to torch",
    ]
    for key in ("save_s", "load_s"):
        times = [seconds[key] for seconds in rounds]
        rates = [
            statistics.median(size / by_side[side] / 1e9 for by_side in times) for side in SIDES
        ]
        ratios = [
            spread([by_side[peer] / by_side["ours"] for by_side in times])
            for peer in ("plain", "torch")
        ]
        lines.append(
            f"{key[:4]:6} {rates[0]:5.2f} {rates[1]:6.2f} {rates[2]:6.2f}   "
            f"{ratios[0]:22} {ratios[1]}"
        )
    stalls = spread([seconds["background"]["stall_s"] for seconds in rounds])
    return "\n".join([*lines, f"stall of an asynchronous save: {stalls} s"])


def main() -> None:
    """Start the ranks, measure saving and loading, and print a table."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.faults.checkpoint", description=__doc__
    )
    parser.add_argument("--layers", type=int, default=3, help="each has 151 MB of state")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="a directory of the file system to measure")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        run_rank(options.layers, options.rounds, options.folder)
        return
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="ptdmpi-checkpoint-") as place:
        words = ["--layers", str(options.layers), "--rounds", str(options.rounds)]
        worker = ["-m", "benchmarks.faults.checkpoint", "--worker", "--folder", place]
        text = answer(RANKS, [*worker, *words], LIMIT_S)
    print(table(json.loads(text.splitlines()[-1])))


if __name__ == "__main__":
    main()
