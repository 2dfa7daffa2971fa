"""One rank that trains the same small GPT by one method after the other.

    mpirun -n N python -m benchmarks.less.rank DATA STEPS CASE,CASE,...

Rank 0 prints one JSON list: of each case its losses, the validation loss of the replicas' mean, how
far replicas were apart, and what a data rank sent in a step, on average over ranks and steps,
beside the planner's formula.
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
VALIDATED = 256  # sequences
RATE = 3e-3


def tree(data: Path, case: MethodCase, steps: int, ranks: int) -> dict[str, dict[str, Any]]:
    """The configuration of a case, on the shards that `data` has."""
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
    """What came of one case; the same on every rank."""
    import torch

    from ptdmpi.config import resolve
    from ptdmpi.engine.engine import Engine, Sums
    from ptdmpi.plan.cost.methods import sent_bytes, told_of
    from ptdmpi.plan.layout.grid import grid_of
    from ptdmpi.train.feed import Feed

    config = resolve(tree(data, case, steps, world.size), world.size)
    axes = world.split(grid_of(config))
    feed = Feed(config, axes, torch.device("cpu"))
    engine = Engine(config, axes, feed.vocab_size)
    losses, apart, sent = [], None, 0
    with contextlib.closing(feed.steps(0)) as batches:
        for step in range(steps):
            result = engine.step(step, feed.place(next(batches)))
            losses.append(result.loss)
            apart = apart if result.consensus is None else result.consensus
            group = result.traffic.tallies["data"]
            sent += sum(group.sent_bytes.values())
    engine.policy.settle()
    total = Sums()
    with engine.replicas.averaged():
        for _, group in feed.validation():
            total += engine.evaluate(feed.place(group))
    every = axes.world.all_gather_object(sent)
    buffer = engine.buffer
    # the second use of a tied table has a gradient, and neither weights nor a code of its own
    whole = case.section["method"] in ("all_reduce", "ring", "parameter_server")
    elements = buffer.gradient_size if whole else buffer.size
    size = buffer.gradients.element_size()
    told = told_of(config.model, feed.vocab_size, elements, size, size)
    return {
        "name": case.name,
        "losses": losses,
        "validation_loss": total.loss / total.tokens,
        "apart": apart,
        "sent_bytes": statistics.mean(every) / steps,
        "foreseen_bytes": sent_bytes(config.data_parallel, told, world.size),
        "parameters": sum(entry.elements for entry in buffer.entries.values()),
    }


def main() -> None:
    data, steps, names = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3].split(";")
    launch.prepare()
    from ptdmpi.comm.world import World, fail_together

    world = World()
    with fail_together(world):
        import torch

        torch.set_num_threads(1)
        cases = {case.name: case for case in (*ALL, *PLAIN)}
        found = []
        for number, name in enumerate(names, 1):
            found.append(train(data, cases[name], steps, world))
            if world.rank == 0:
                loss = found[-1]["validation_loss"]
                print(f"{number}/{len(names)} {name}: {loss:.3f}", file=sys.stderr, flush=True)
        if world.rank == 0:
            print(json.dumps(found))


if __name__ == "__main__":
    main()
