"""Resident memory of a rank in two steps of training, beside the planner's account of it.

. jobs/mpi-env.sh; mpirun -n 2 .venv/bin/python -m benchmarks.speed.resident --zero 3
    [--hidden 640] [--layers 8] [--vocabulary 32000] [--precision bf16] [--lora 8 [--base nf4]]

One process measures one setting: what a process had resident once stays in its peak.
"""

import argparse
import os
import resource
import time

import torch

from ptdmpi.base.heap import give_back, keep_freed
from ptdmpi.comm.world import World
from ptdmpi.config import Layout, synthetic_config
from ptdmpi.engine.engine import Engine
from ptdmpi.model import kernels
from ptdmpi.model.batch import Batch
from ptdmpi.model.parameters import data_types
from ptdmpi.plan.cost.memory import MemoryModel
from ptdmpi.plan.layout.grid import grid_of
from ptdmpi.train.capacity import process_bytes

MIB = 2**20
SEQUENCE = 64  # short: state and not activations is looked at
STEPS = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--zero", type=int, default=0)
    for name, default in (("hidden", 640), ("layers", 8), ("vocabulary", 32000)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--lora", type=int, help="adapters of this rank beside a frozen model")
    parser.add_argument("--base", default="none", help="its matrices in int8, int4 or nf4")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed(os.environ)
    world = World()
    layout = Layout(1, 1, world.size, zero=asked.zero)
    sizes = {"layers": asked.layers, "hidden": asked.hidden, "heads": asked.hidden // 80 or 1}
    model = {"kind": "gpt", "seq_length": SEQUENCE, **sizes}
    run = {"run": {"steps": STEPS}, "precision": {"compute": asked.precision}}
    if asked.lora is not None:
        run |= {"adapt": {"method": "lora", "rank": asked.lora}}
        run |= {"quantize": {"weights": asked.base}}
    config = synthetic_config(layout, model, **run)
    compute = data_types(asked.precision).compute
    some = torch.ones(256, 256, dtype=compute)
    some @ some  # what libraries take once is theirs
    axes = world.split(grid_of(config))
    _, start = process_bytes()
    engine = Engine(config, axes, asked.vocabulary)
    give_back()
    _, built = process_bytes()
    ids = torch.randint(asked.vocabulary, (SEQUENCE + 1, 1))
    batch = Batch(ids[:-1], ids[1:], None, torch.tensor([axes["data"].rank]))
    for step in range(STEPS):
        begin_s = time.perf_counter()
        engine.step(step, [batch])
        last_s = time.perf_counter() - begin_s
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    memory = MemoryModel.of(config, asked.vocabulary, kernels.widens("cpu", compute))
    foreseen = memory.peak(layout, 0, config.microbatches)
    if world.rank == 0:
        found = ((built - start, foreseen.standing), (peak - start, foreseen.total))
        texts = (f"{a / MIB:7.0f} {b / MIB:7.0f}" for a, b in found)
        print(
            f"d={world.size} zero={asked.zero}  MiB of rank 0: built, formula {next(texts)}; "
            f"peak of a step, formula {next(texts)}; the last step took {last_s:.2f} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
