"""`make validate-plan-here`: predictions for this machine beside measured steps.

Probes the machine on two ranks, then times the steps of twelve layouts of one and two ranks and
compares. All layouts are timed in turn, round by round, so that a disturbance meets several of
them; their order counts only where they differ by more than the spread of their rounds.
"""

import itertools
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

from benchmarks.launch import answer
from benchmarks.turns import round_of
from ptdmpi.base.heap import keep_freed
from ptdmpi.config.layout import Layout
from ptdmpi.plan.cost.price import Pricer
from ptdmpi.plan.machine.cluster import load_cluster, load_model
from ptdmpi.plan.show.table import lines

RANKS, BATCH, PRECISION = 2, 8, "fp32"
ROUNDS, STEPS = 3, 3  # of each layout; the first step of a round warms up
MODEL = "l=6,h=384,a=6,s=256,V=2048"
LAYOUTS = (
    Layout(1, 1, 1, micro_size=2),
    Layout(1, 1, 2, micro_size=1),
    Layout(1, 1, 2, micro_size=4),
    Layout(1, 1, 2, micro_size=2, recompute="full"),
    Layout(2, 1, 1, micro_size=1),
    Layout(2, 1, 1, micro_size=4),
    Layout(2, 1, 1, micro_size=4, sequence_parallel=True),
    Layout(1, 2, 1, micro_size=1),
    Layout(1, 2, 1, micro_size=4),
    Layout(1, 2, 1, micro_size=2, schedule="gpipe"),
    Layout(1, 2, 1, 2, 1, "interleaved"),
    Layout(1, 2, 1, 3, 2, "interleaved", "full"),
)


def measure(text: str) -> None:
    """On each rank: rounds of all layouts; rank 0 prints the step times of each, by round."""
    from ptdmpi.comm import launch

    launch.prepare()
    from ptdmpi.comm.world import World, fail_together

    job = json.loads(text)
    world = World()
    with fail_together(world):
        import torch

        torch.set_num_threads(1)
        keep_freed(os.environ)
        layouts = [Layout(**fields) for fields in job["layouts"]]
        parts = {layout.ranks: world.first(layout.ranks) for layout in layouts}

        def side(layout: Layout) -> float:
            part = parts[layout.ranks]
            time_s = 0.0 if part is None else _steps_s(part, layout, job)
            world.control.Barrier()
            return time_s

        sides = {str(number): partial(side, layout) for number, layout in enumerate(layouts)}
        rounds = [round_of(sides, number) for number in range(job["rounds"])]
        if world.rank == 0:
            print(json.dumps([[times[name] for times in rounds] for name in sides]))


def _steps_s(world, layout: Layout, job: dict) -> float:
    """Median step of one layout on fresh weights."""
    import time

    import torch

    from ptdmpi.config import synthetic_config
    from ptdmpi.engine.engine import Engine
    from ptdmpi.model.stage import Batch
    from ptdmpi.plan.layout.grid import training_grid

    model = load_model(job["model"])
    config = synthetic_config(
        layout,
        model.config.model_dump(),
        run={"steps": job["steps"]},
        batch={"global_size": job["batch"]},
        precision={"compute": PRECISION},
    )
    axes = world.split(
        training_grid(tensor=layout.tensor, pipeline=layout.pipeline, data=layout.data)
    )
    engine = Engine(config, axes, model.vocab_size)
    ids = torch.randint(model.vocab_size, (model.config.seq_length + 1, layout.micro_size))
    axes["tensor"].broadcast(ids)
    batch = Batch(ids[:-1], ids[1:].contiguous(), None, torch.arange(layout.micro_size))
    times = []
    for step in range(job["steps"]):
        axes.world.barrier()
        start = time.perf_counter()
        engine.step(step, [batch] * config.microbatches)
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def kendall(
    predicted: Sequence[float], measured: Sequence[Sequence[float]]
) -> tuple[float, int, int]:
    """(tau, pairs that count, near-ties): a near-tie is a pair whose medians differ by no more than
    the larger spread of its rounds."""
    signs, ties = [], 0
    for i, j in itertools.combinations(range(len(measured)), 2):
        gap = statistics.median(measured[i]) - statistics.median(measured[j])
        spread = max(max(times) - min(times) for times in (measured[i], measured[j]))
        if abs(gap) <= spread:
            ties += 1
            continue
        signs.append(1 if gap * (predicted[i] - predicted[j]) > 0 else -1)
    return (statistics.fmean(signs) if signs else float("nan")), len(signs), ties


def compare(predicted: Sequence[float], measured: Sequence[Sequence[float]]) -> str:
    rows = [["layout", "measured", "spread", "predicted", "error", ""]]
    errors = []
    for layout, guess, times in zip(LAYOUTS, predicted, measured, strict=True):
        median = statistics.median(times)
        errors.append(guess / median - 1)
        extra = ", sequence parallel" if layout.sequence_parallel else ""
        rows.append(
            [
                str(layout),
                f"{median:.3f} s",
                f"{(max(times) - min(times)) / median:.1%}",
                f"{guess:.3f} s",
                f"{errors[-1]:+.1%}",
                f"{layout.schedule}, recompute {layout.recompute}{extra}",
            ]
        )
    tau, pairs, ties = kendall(predicted, measured)
    return "\n".join(
        [
            *lines(rows),
            "",
            f"median error {statistics.median(map(abs, errors)):.1%} (goal 10 %), "
            f"largest {max(map(abs, errors)):.1%}",
            f"Kendall tau {tau:.2f} over {pairs} pairs, {ties} near-ties left out (goal 0.8)",
        ]
    )


def main() -> None:
    if len(sys.argv) == 2:
        measure(sys.argv[1])
        return
    job = {
        "layouts": [asdict(layout) for layout in LAYOUTS],
        "rounds": ROUNDS,
        "steps": STEPS,
        "batch": BATCH,
        "model": MODEL,
    }
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "here.toml")
        print(answer(RANKS, ["-m", "ptdmpi", "probe", "--output", path, "--precision", PRECISION]))
        pricer = Pricer(load_cluster(path), load_model(MODEL), BATCH, PRECISION)
    words = ["-m", "benchmarks.planning.validate_here", json.dumps(job)]
    measured = json.loads(answer(RANKS, words))
    predicted = [pricer.price(layout).step_time_s for layout in LAYOUTS]
    print(f"{MODEL}, batch {BATCH}, {PRECISION}, one thread per rank")
    print(compare(predicted, measured))


if __name__ == "__main__":
    main()
