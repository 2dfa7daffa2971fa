"""Memory and time of training on long sequences on this machine, where each sequence is divided
among several ranks.

    . jobs/mpi-env.sh; mpirun -n 2 .venv/bin/python -m benchmarks.planning.long_here 4096

The command-line argument is the length of a sequence. The number of started ranks is the
context-parallel size.
"""

import json
import sys
import time
from dataclasses import asdict, dataclass
from functools import partial

from benchmarks.launch import answer

MODEL = {
    "kind": "llama",
    "layers": 2,
    "hidden": 256,
    "heads": 4,
    "kv_heads": 2,
    "ffn_hidden": 768,
}
VOCAB_SIZE = 512
PRECISION = "fp32"
STEPS = 4  # the first step is a warm-up, and memory is measured in the last step


@dataclass(frozen=True)
class LongStep:
    """The results of training steps in which `context` ranks share one sequence. `peak_bytes` and
    `formula_bytes` are the maximum number of bytes of tensors on a rank in addition to the state,
    as measured and as predicted. `step_s` is the time in seconds of the fastest step."""

    context: int
    length: int
    peak_bytes: int
    formula_bytes: int
    step_s: float


def long_step(context: int, length: int) -> LongStep:
    """Return the measurements of `context` ranks that share a sequence of `length` positions. The
    program exits if ranks fail."""
    text = answer(context, ["-m", "benchmarks.planning.long_here", str(length)])
    # read only the last line, because the profiler prints lines, too
    return LongStep(**json.loads(text.splitlines()[-1]))


def _measure(length: int) -> None:
    """Measure training steps with sequences of `length` positions on this rank. Rank 0 prints the
    `LongStep` as JSON."""
    from ptdmpi.comm import launch

    launch.prepare()
    import torch

    from benchmarks.planning.allocated import measured
    from ptdmpi.comm.world import World, fail_together
    from ptdmpi.config import Layout, synthetic_config
    from ptdmpi.engine.engine import Engine
    from ptdmpi.model.batch import Microbatch
    from ptdmpi.plan.cost.memory import MemoryModel
    from ptdmpi.plan.layout.grid import grid_of

    world = World()
    with fail_together(world):
        torch.set_num_threads(1)
        layout = Layout(1, 1, 1, context=world.size)
        config = synthetic_config(
            layout,
            {**MODEL, "seq_length": length},
            run={"steps": STEPS},
            precision={"compute": PRECISION},
        )
        axes = world.split(grid_of(config))
        engine = Engine(config, axes, VOCAB_SIZE)
        ids = torch.arange(length + 1)[:, None] % VOCAB_SIZE
        batch = Microbatch.of_ids(ids, torch.arange(1)).at(engine.context.positions)
        times = []
        for step in range(STEPS - 1):
            axes.world.barrier()
            begin_s = time.perf_counter()
            engine.step(step, [batch])
            times.append(time.perf_counter() - begin_s)
        _, peak = measured(partial(engine.step, STEPS - 1, [batch]))
        formula = MemoryModel.of(config, VOCAB_SIZE).peak(layout, 0, 1)
        needed = round(formula.activations + formula.working)
        result = LongStep(
            context=world.size,
            length=length,
            peak_bytes=peak,
            formula_bytes=needed,
            step_s=min(times[1:]),
        )
        if world.rank == 0:
            print(json.dumps(asdict(result)))


if __name__ == "__main__":
    _measure(int(sys.argv[1]))
