"""One rank of the comparison of PTD-P and ZeRO-3. The rank trains the same model in both layouts,
alternately, and measures the steps.

    mpirun ... python -m benchmarks.network.train JOB

JOB is JSON with the settings of `Compared` and with the messages that measure the link. The engines
of both layouts are in the same processes. So the engine that waits for its turn takes no processor
time from the other engine.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.network.case import Compared, layouts
from benchmarks.network.pingpong import one_way_s
from benchmarks.turns import round_of
from ptdmpi.base.heap import keep_freed
from ptdmpi.comm import launch
from ptdmpi.config import Config
from ptdmpi.plan.layout.grid import grid_of

# maximum relative difference of losses, which is not 0, because the two layouts add in different
# orders
LOSSES_AGREE = 1e-4


def sent_bytes() -> int:
    """Return the bytes that have left this node through eth0 (proc(5), /proc/net/dev: the ninth
    column)."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, columns = line.partition(":")
        if name.strip() == "eth0":
            return int(columns.split()[8])
    raise LookupError("this rank is not in a node: it has no eth0")


def compare(case: Compared, sizes: dict[int, int]) -> dict:
    """Do all measurements, together with the other ranks, and return the results of this rank. The
    losses and the sent bytes are the same on all ranks, and each rank measures its own times.

    `sizes` maps the size of a message in bytes to the number of times that it is sent, in order to
    measure the link.
    """
    from ptdmpi.comm.world import World, fail_together

    world = World()
    with fail_together(world):
        import torch

        torch.set_num_threads(1)
        keep_freed(os.environ)
        link = one_way_s(world.control, sizes)
        axes: dict = {}
        rows = [_row(case, batch, world, axes) for batch in case.batches]
        return {"nodes": world.nodes, "rank": world.rank, "one_way_s": link, "rows": rows}


def _row(case: Compared, batch: int, world, axes: dict) -> dict:
    """Return, for both layouts with the global batch size `batch`, the tokens/s in each round, and
    the bytes that cross the link in a step."""
    sides: dict[str, Callable] = {}
    for way, layout in layouts(world.size, batch).items():
        config = case.config(layout, batch)
        # reuse the communicators, because MPI libraries have a limited number of them
        if way not in axes:
            axes[way] = world.split(grid_of(config))
        trainer = _Trainer(config, case.vocab_size, world, axes[way])
        trainer.measure()  # a warm-up, which connects the ranks and allocates memory
        sides[way] = trainer.measure
    rounds = [round_of(sides, number) for number in range(case.rounds)]
    for results in rounds:
        loss, other = (result["loss"] for result in results.values())
        if abs(loss - other) > LOSSES_AGREE * abs(other):
            raise RuntimeError(f"batch {batch}: losses {loss} and {other} of the same step")
    tokens = batch * case.seq_length
    return {
        "batch": batch,
        "ways": {
            way: {
                "layout": str(layouts(world.size, batch)[way]),
                "tokens_per_s": [tokens / r[way]["step_time_s"] for r in rounds],
                "sent_bytes": rounds[0][way]["sent_bytes"],
            }
            for way in sides
        },
    }


class _Trainer:
    """The training engine of `ptdmpi train` with one layout, on one rank."""

    def __init__(self, config: Config, vocab_size: int, world, axes) -> None:
        from ptdmpi.engine.engine import Engine

        self.config = config
        self.vocab_size = vocab_size
        self.world = world
        self.axes = axes
        self.engine = Engine(config, axes, vocab_size)
        self.done = 0

    def measure(self) -> dict:
        """Train a step. Return its seconds, its loss, and the bytes that crossed the link during
        the step."""
        control = self.world.control
        batches = self._microbatches(self.done)
        control.Barrier()
        before = sent_bytes()
        begin = time.perf_counter()
        loss = self.engine.step(self.done, batches).loss
        control.Barrier()
        time_s = time.perf_counter() - begin
        sent = sent_bytes() - before if self.world.local_rank == 0 else 0
        self.done += 1
        return {"step_time_s": time_s, "sent_bytes": control.allreduce(sent), "loss": loss}

    def _microbatches(self, step: int) -> list:
        """Return the microbatches of this data rank for a step. The global batch depends only on
        the step, so both layouts train the same tokens."""
        import torch

        from ptdmpi.model.batch import Microbatch

        generator = torch.Generator().manual_seed(step)
        global_size = self.config.batch.global_size
        size = self.config.batch.micro_size
        shape = (global_size, self.config.model.seq_length + 1)
        ids = torch.randint(self.vocab_size, shape, generator=generator)
        samples = torch.arange(global_size) + step * global_size
        own = self.config.microbatches * size
        first = self.axes["data"].rank * own
        microbatches = []
        for start in range(first, first + own, size):
            part = ids[start : start + size].t()
            numbers = samples[start : start + size]
            microbatches.append(Microbatch.of_ids(part, numbers))
        return microbatches


def main() -> None:
    """Do the job that the command line describes. The first rank prints the results as JSON."""
    launch.prepare()
    job = json.loads(sys.argv[1])
    results = compare(Compared(**job["case"]), dict(job["messages"]))
    if results.pop("rank") == 0:
        print(json.dumps(results))


if __name__ == "__main__":
    main()
