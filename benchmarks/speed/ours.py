"""This project's side: the engine of `ptdmpi train`, fed with synthetic batches."""

import os
import statistics
import time
from collections import Counter
from collections.abc import Callable

import torch
import torch.nn.functional as F

from benchmarks.speed.case import Row, synthetic_ids
from ptdmpi.base.heap import give_back, keep_freed
from ptdmpi.comm.world import World, fail_together
from ptdmpi.engine.engine import Engine
from ptdmpi.model import kernels
from ptdmpi.model.batch import Batch
from ptdmpi.model.parameters import PRECISIONS
from ptdmpi.plan.layout.grid import grid_of

GEMM_REPEATS = 5


class OurTrainer:
    """One rank of the engine."""

    def __init__(self, row: Row, world: World) -> None:
        config = row.config
        torch.set_num_threads(config.run.threads)
        keep_freed(os.environ)
        axes = world.split(grid_of(config))
        self.row, self.rank, self.data_rank = row, world.rank, axes["data"].rank
        self.microbatches = config.microbatches
        self.engine = Engine(config, axes, row.case.vocab_size)
        give_back()

    def batch(self, step: int) -> list[Batch]:
        size = self.row.case.micro_size
        ids = synthetic_ids(self.row, step)
        first = self.data_rank * self.microbatches * size
        mine = ids[first : first + self.microbatches * size]
        samples = torch.arange(len(mine)) + step * self.row.case.global_size + first
        return [
            Batch(
                part[:, :-1].t().contiguous(),
                part[:, 1:].t().contiguous(),
                weights=None,
                samples=numbers,
            )
            for part, numbers in zip(mine.split(size), samples.split(size), strict=True)
        ]

    def step(self, step: int, batch: list[Batch]) -> float:
        return self.engine.step(step, batch).loss

    def gemm_time_s(self) -> float:
        """Three GEMMs for each linear layer and microbatch: output, input and weight gradient.

        They are taken in the type in which the layers take them on this device.
        """
        shapes: Counter[torch.Size] = Counter()
        for stage in self.engine.stages.values():
            for name, weight in stage.named_logical_parameters():
                if weight.dim() == 2 and not name.startswith("embedding."):
                    shapes[weight.shape] += 1
        rows = self.row.case.micro_size * self.row.case.seq_length
        dtype = PRECISIONS[self.row.precision].compute
        if kernels.widens("cpu", dtype):
            dtype = torch.float32
        once = sum(count * _linear_time_s(rows, *shape, dtype) for shape, count in shapes.items())
        return once * self.microbatches


def _linear_time_s(rows: int, outputs: int, inputs: int, dtype: torch.dtype) -> float:
    """Median time of x W^T, dy W and dy^T x together."""
    x = torch.randn(rows, inputs).to(dtype)
    dy = torch.randn(rows, outputs).to(dtype)
    weight = torch.randn(outputs, inputs).to(dtype)
    times = []
    for _ in range(1 + GEMM_REPEATS):
        begin = time.perf_counter()
        F.linear(x, weight)
        dy @ weight
        dy.t() @ x
        times.append(time.perf_counter() - begin)
    return statistics.median(times[1:])


def run(row: Row, serve: Callable[[OurTrainer], None]) -> None:
    world = World()
    with fail_together(world):
        serve(OurTrainer(row, world))
