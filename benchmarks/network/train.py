"""One rank of the comparison: trains the same model both ways, in turn, and times the steps.

    mpirun ... python -m benchmarks.network.train JOB

Both ways live in the same processes, so that nothing of the side that waits runs beside the other.
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

LOSSES_AGREE = 1e-4  # relative, in fp32: the two ways take other sums


def sent_bytes() -> int:
    """What has left this node by eth0 (proc(5), /proc/net/dev: the ninth column)."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, columns = line.partition(":")
        if name.strip() == "eth0":
            return int(columns.split()[8])
    raise LookupError("this rank is in no node: there is no eth0")


def compare(case: Compared, sizes: dict[int, int]) -> dict:
    """All that is measured on these ranks; the same on each of them.

    `sizes`: messages of the measurement of the link, bytes -> how often.
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
    """Both ways with one global batch: tokens/s by round, bytes across the link in a step."""
    sides: dict[str, Callable] = {}
    for way, layout in layouts(world.size, batch).items():
        trainer = _Trainer(case, batch, way, layout, world, axes)
        trainer.measure()  # connects, and allocates what is kept
        sides[way] = trainer.measure
    rounds = [round_of(sides, number) for number in range(case.rounds)]
    for of_round in rounds:
        one, other = (of_side["loss"] for of_side in of_round.values())
        if abs(one - other) > LOSSES_AGREE * abs(other):
            raise RuntimeError(f"batch {batch}: losses {one} and {other} of the same step")
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
    """One rank of the engine of `ptdmpi train`, in one layout."""

    def __init__(self, case: Compared, batch: int, way: str, layout, world, axes: dict) -> None:
        from ptdmpi.engine.engine import Engine
        from ptdmpi.plan.layout.grid import grid_of

        self.config = case.config(layout, batch)
        if way not in axes:  # MPI libraries have a limited number of communicators
            axes[way] = world.split(grid_of(self.config))
        self.case, self.world, self.axes, self.batch = case, world, axes[way], batch
        self.engine = Engine(self.config, self.axes, case.vocab_size)
        self.done = 0

    def measure(self) -> dict:
        """Train a step: its seconds, the bytes across the link in it, its loss."""
        control = self.world.control
        batches = self._microbatches(self.done)
        control.Barrier()
        before, begin = sent_bytes(), time.perf_counter()
        loss = self.engine.step(self.done, batches).loss
        control.Barrier()
        time_s = time.perf_counter() - begin
        sent = sent_bytes() - before if self.world.local_rank == 0 else 0
        self.done += 1
        return {"step_time_s": time_s, "sent_bytes": control.allreduce(sent), "loss": loss}

    def _microbatches(self, step: int) -> list:
        """This data rank's part of a global batch that depends on the step alone."""
        import torch

        from ptdmpi.model.batch import Batch

        generator = torch.Generator().manual_seed(step)
        shape = (self.batch, self.case.seq_length + 1)
        ids = torch.randint(self.case.vocab_size, shape, generator=generator)
        size, count = self.config.batch.micro_size, self.config.microbatches
        first = self.axes["data"].rank * count * size
        samples = torch.arange(self.batch) + step * self.batch
        made = []
        for start in range(first, first + count * size, size):
            part = ids[start : start + size].t()
            own = samples[start : start + size]
            made.append(Batch(part[:-1].contiguous(), part[1:].contiguous(), None, own))
        return made


def main() -> None:
    launch.prepare()
    job = json.loads(sys.argv[1])
    found = compare(Compared(**job["case"]), dict(job["messages"]))
    if found.pop("rank") == 0:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
