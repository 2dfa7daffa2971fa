"""One rank of a job that trains the same small GPT with one method after another.

    mpirun -n N python -m benchmarks.less.rank DATA STEPS CASE;CASE;...

Rank 0 prints one JSON list. An entry of the list has the losses of a case, the validation loss of
the mean of the replicas, and the distance between replicas. The entry also has the bytes that a
data rank sends in a step: as counted (averaged over ranks and steps), and as computed by the
planner's formula.
"""

import contextlib
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from benchmarks.less.cases import ALL, PLAIN, MethodCase
from ptdmpi.comm import launch

MODEL = {"layers": 2, "hidden": 64, "heads": 4, "seq_length": 64}
BATCH = 32
VALIDATED = 256  # number of sequences on which the models are validated
RATE = 3e-3


def tree(data: Path, case: MethodCase, steps: int, ranks: int) -> dict[str, dict[str, Any]]:
    """Return the configuration for a case, on the shards in `data`."""
    return {
        "run": {"steps": steps, "dir": str(data / "none")},
        "model": dict(MODEL),
        "batch": {"global_size": BATCH, "micro_size": BATCH // ranks},
        "data_parallel": dict(case.section),
        "optimizer": {
            "learning_rate": RATE,
            "warmup_steps": min(20, steps // 4),
            **case.optimizer,
        },
        "data": {"train": [{"path": str(data / "train")}], "valid": str(data / "valid")},
        "log": {"validate_samples": VALIDATED},
    }


def train(data: Path, case: MethodCase, steps: int, world) -> dict[str, Any]:
    """Train one case, and return its entry of the JSON list, which is the same on every rank."""
    import torch

    from ptdmpi.config import resolve
    from ptdmpi.engine.engine import Engine
    from ptdmpi.model.output.losses import TASK, SummedLoss
    from ptdmpi.plan.cost.methods import sent_bytes, told_of
    from ptdmpi.plan.layout.grid import grid_of
    from ptdmpi.train.feed import Feed

    config = resolve(tree(data, case, steps, world.size), world.size)
    axes = world.split(grid_of(config))
    feed = Feed(config, axes, torch.device("cpu"))
    engine = Engine(config, axes, feed.vocab_size)
    losses = []
    apart = None
    sent = 0
    with contextlib.closing(feed.steps(0)) as batches:
        for step in range(steps):
            result = engine.step(step, feed.place(next(batches)))
            losses.append(result.loss)
            if result.consensus is not None:
                apart = result.consensus
            group = result.traffic.tallies["data"]
            sent += sum(group.sent_bytes.values())
    engine.policy.settle()
    total = SummedLoss()
    with engine.replicas.averaged():
        for _, group in feed.validation():
            total = total.plus(engine.evaluate(feed.place(group))[TASK])
    every = axes.world.all_gather_object(sent)
    buffer = engine.buffer
    # an embedding table that is also the head has two gradients; methods that reduce complete
    # gradients send both, so count both
    whole = case.section["method"] in ("all_reduce", "ring", "parameter_server")
    elements = buffer.gradient_size if whole else buffer.size
    size = buffer.gradients.element_size()
    numbers = told_of(
        config.model, feed.vocab_size, elements, gradient_bytes=size, master_bytes=size
    )
    return {
        "name": case.name,
        "losses": losses,
        "validation_loss": total.mean,
        "apart": apart,
        "sent_bytes": statistics.mean(every) / steps,
        "foreseen_bytes": sent_bytes(config.data_parallel, numbers, world.size),
        "parameters": sum(entry.elements for entry in buffer.entries.values()),
    }


def main() -> None:
    """Train the cases that the command line names."""
    data = Path(sys.argv[1])
    steps = int(sys.argv[2])
    names = sys.argv[3].split(";")
    launch.prepare()
    from ptdmpi.comm.world import World, fail_together

    world = World()
    with fail_together(world):
        import torch

        torch.set_num_threads(1)
        cases = {case.name: case for case in (*ALL, *PLAIN)}
        rows = []
        for number, name in enumerate(names, 1):
            rows.append(train(data, cases[name], steps, world))
            if world.rank == 0:
                loss = rows[-1]["validation_loss"]
                print(f"{number}/{len(names)} {name}: {loss:.3f}", file=sys.stderr, flush=True)
        if world.rank == 0:
            print(json.dumps(rows))


if __name__ == "__main__":
    main()
