"""Step times of layouts on this machine, measured in rounds. The ranks are started only once, for
all rounds.

Each round measures all cases, so that a disturbance of the machine affects all cases.
"""

import json
import os
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from benchmarks.launch import answer
from benchmarks.turns import round_of
from ptdmpi.base.heap import keep_freed
from ptdmpi.config.layout import Layout
from ptdmpi.plan.machine.cluster import load_model


@dataclass(frozen=True)
class TimedCase:
    """A case to be measured: a layout, and the global batch size in sequences."""

    layout: Layout
    batch: int


@dataclass(frozen=True)
class Turns:
    """The settings of a measurement: the model, the precision, the number of rounds, and the number
    of steps of a case in a round. The first step of a case in a round is a warm-up."""

    model: str
    precision: str
    rounds: int = 3
    steps: int = 3


def measured_steps(ranks: int, cases: Sequence[TimedCase], turns: Turns) -> list[list[float]]:
    """Measure the cases on `ranks` ranks with one thread each. Return, for each case, a list with
    its median step time in each round, in seconds. A case that needs fewer ranks runs on the first
    ranks. The program exits if ranks fail.
    """
    job = {"cases": [asdict(case) for case in cases], **asdict(turns)}
    text = answer(ranks, ["-m", "benchmarks.planning.steps_here", json.dumps(job)])
    times: list[list[float]] = json.loads(text)
    return times


def _measure(text: str) -> None:
    """Do the measurement of all cases on this rank. Rank 0 prints, for each case, its median step
    times in all rounds, as JSON."""
    from ptdmpi.comm import launch

    launch.prepare()
    from ptdmpi.comm.world import World, fail_together

    job = json.loads(text)
    cases = [TimedCase(Layout(**case["layout"]), case["batch"]) for case in job.pop("cases")]
    turns = Turns(**job)
    world = World()
    with fail_together(world):
        import torch

        torch.set_num_threads(1)
        keep_freed(os.environ)
        parts = {ranks: world.first(ranks) for ranks in {case.layout.ranks for case in cases}}

        def side(case: TimedCase) -> float:
            part = parts[case.layout.ranks]
            time_s = 0.0 if part is None else _step_s(part, case, turns)
            world.control.Barrier()
            return time_s

        sides = {str(number): partial(side, case) for number, case in enumerate(cases)}
        rounds = [round_of(sides, number) for number in range(turns.rounds)]
        if world.rank == 0:
            print(json.dumps([[times[name] for times in rounds] for name in sides]))


def _step_s(world: Any, case: TimedCase, turns: Turns) -> float:
    """Train a case from new initial weights for `turns.steps` steps, and return the median step
    time in seconds."""
    import time

    import torch

    from ptdmpi.config import synthetic_config
    from ptdmpi.engine.engine import Engine
    from ptdmpi.model.batch import Microbatch
    from ptdmpi.plan.layout.grid import grid_of

    model = load_model(turns.model)
    config = synthetic_config(
        case.layout,
        model.config.model_dump(),
        run={"steps": turns.steps},
        batch={"global_size": case.batch},
        precision={"compute": turns.precision},
    )
    axes = world.split(grid_of(config))
    engine = Engine(config, axes, model.vocab_size)
    ids = torch.randint(model.vocab_size, (model.config.seq_length + 1, case.layout.micro_size))
    axes["tensor"].broadcast(ids)
    batch = Microbatch.of_ids(ids, torch.arange(case.layout.micro_size))
    times = []
    for step in range(turns.steps):
        axes.world.barrier()
        start = time.perf_counter()
        engine.step(step, [batch] * config.microbatches)
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


if __name__ == "__main__":
    _measure(sys.argv[1])
