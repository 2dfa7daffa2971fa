"""A comparison of the pipeline runner with the simulator, in steps whose stages only sleep, and a
measurement of the host's time for an op.

    . jobs/mpi-env.sh; mpirun -n 4 .venv/bin/python -m benchmarks.speed.makespans

This command prints, for each schedule, the time of the runner's step and the simulator's makespan.
The command also prints the host's microseconds per action (an op or a message) if ops do nothing.
With activations of 128 bytes, this time consists of the time of Python and the message latency.
With activations of 1 MiB, as in training, it also contains the time to copy the activations. A
stage that sleeps needs no core, so there may be more ranks than cores. Other processes on the cores
disturb the measurement.
"""

import itertools
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from mpi4py import MPI

from ptdmpi.comm.communicator import OneRank
from ptdmpi.comm.world import World
from ptdmpi.engine.runner import Runner
from ptdmpi.model.boundary import Boundary
from ptdmpi.model.tensor_parallel import TensorAxis
from ptdmpi.plan.layout.grid import Grid
from ptdmpi.plan.schedule.orders import build
from ptdmpi.plan.schedule.program import post_early, programs
from ptdmpi.plan.schedule.simulate import Costs, simulate
from ptdmpi.watch.stopwatch import Place, Stopwatch

# seconds of a forward op (F), of an op for the input gradient (I) and of an op for the weight
# gradients (W); a backward op (B) takes twice as long
OP_S = 0.03
MICROBATCHES = 8
SHAPES = ((4, 1, 8), (512, 1, 512))  # shapes of activations in float32: 128 bytes and 1 MiB
SCHEDULES = (("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zb-h1", 1), ("zb-v", 2))


class Sleeper:
    """A stage whose ops sleep for `op_s` seconds and return the same tensor each time."""

    in_flight = 0

    def __init__(self, number: int, stages: int, op_s: float, shape: tuple[int, int, int]) -> None:
        self.first = number == 0
        self.last = number == stages - 1
        self.op_s = op_s
        self.boundary = Boundary(shape, TensorAxis(OneRank()), False)
        self.output = torch.zeros(shape)

    def _slept(self, times: int, silent: bool) -> torch.Tensor | None:
        if self.op_s:
            time.sleep(times * self.op_s)
        return None if silent else self.output

    def begin_step(self) -> None:
        """Do nothing, because this stage keeps no data from the previous step."""

    def forward_microbatch(self, microbatch: object, x: object) -> torch.Tensor | None:
        """Sleep in place of a forward op (F)."""
        return self._slept(1, self.last)

    def backward_microbatch(self, microbatch: object, dy: object) -> torch.Tensor | None:
        """Sleep in place of a backward op (B)."""
        return self._slept(2, self.first)

    def input_microbatch(self, microbatch: object, dy: object) -> torch.Tensor | None:
        """Sleep in place of an op for the gradient of the input (I)."""
        return self._slept(1, self.first)

    def weight_microbatch(self, microbatch: object, nothing: object) -> None:
        """Sleep in place of an op for the gradients of the weights (W)."""
        self._slept(1, True)


@dataclass(frozen=True)
class Makespan:
    """The measured (`taken_s`) and simulated seconds of a step on `ranks` pipeline ranks, and the
    host's microseconds per action (op or message) if ops do nothing."""

    schedule: str
    ranks: int
    message_bytes: int
    taken_s: float
    simulated_s: float
    per_action_us: float

    def __str__(self) -> str:
        over = self.taken_s / self.simulated_s - 1
        return (
            f"{self.schedule:<12} p={self.ranks} {self.message_bytes:>8} bytes  "
            f"{self.taken_s:.4f} s, simulated "
            f"{self.simulated_s:.4f} s: {over:+.2%}; {self.per_action_us:.0f} us per action"
        )


def rows(comm: MPI.Comm, repeats: int = 3) -> Iterator[Makespan]:
    """Yield, for each schedule and each shape of the activations, the fastest of `repeats` steps.
    All ranks call this function."""
    axes = World(comm).split(Grid({"tensor": 1, "data": 1, "pipeline": comm.size}))
    axis = axes["pipeline"]
    for (kind, virtual), shape in itertools.product(SCHEDULES, SHAPES):
        schedule = build(kind, comm.size, virtual, MICROBATCHES)
        program = programs(schedule)[axis.rank]
        if axis.posts_early:
            program = post_early(program)
        taken = {OP_S: math.inf, 0.0: math.inf}
        for op_s in taken:
            own = schedule.stages_of(axis.rank)
            stages = {number: Sleeper(number, schedule.stages, op_s, shape) for number in own}
            runner = Runner(stages, axis, torch.float32, torch.device("cpu"))
            for _ in range(repeats):
                watch = Stopwatch(comm.rank, Place(), axes.clock)
                comm.Barrier()
                began_s = time.perf_counter()
                runner.run(schedule, program, range(MICROBATCHES), watch)
                own_s = time.perf_counter() - began_s
                taken[op_s] = min(taken[op_s], comm.allreduce(own_s, MPI.MAX))
        simulated_s = simulate(schedule, Costs(OP_S, 2 * OP_S)).makespan_s
        per_action_us = 1e6 * taken[0.0] / len(program)
        message_bytes = 4 * math.prod(shape)
        yield Makespan(
            schedule=kind,
            ranks=comm.size,
            message_bytes=message_bytes,
            taken_s=taken[OP_S],
            simulated_s=simulated_s,
            per_action_us=per_action_us,
        )


if __name__ == "__main__":
    for row in rows(MPI.COMM_WORLD):
        if MPI.COMM_WORLD.rank == 0:
            print(row, flush=True)
