"""The resident memory of a rank in two bf16 training steps, as measured and as predicted by the
planner.

. jobs/mpi-env.sh; mpirun -n 2 .venv/bin/python -m benchmarks.speed.resident --zero 3
    [--hidden 640] [--layers 8] [--vocabulary 32000] [--lora 8 [--base nf4]]

Each process measures only one setting, because the peak memory of a process never decreases.
"""

import argparse
import os
import resource
import time

import torch

from ptdmpi.base.heap import give_back, keep_freed
from ptdmpi.comm.world import World
from ptdmpi.config import Config, Layout, synthetic_config
from ptdmpi.engine.engine import Engine
from ptdmpi.model.batch import Microbatch
from ptdmpi.model.kernels import USUAL
from ptdmpi.model.parameters import data_types
from ptdmpi.plan.cost.memory import MemoryModel
from ptdmpi.plan.layout.grid import grid_of
from ptdmpi.train.capacity import process_bytes

MIB = 2**20
# short sequences, because the memory of the state is measured, not the memory of activations
SEQUENCE = 64
STEPS = 2
PRECISION = "bf16"


def arguments() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--zero", type=int, default=0)
    for name, default in (("hidden", 640), ("layers", 8), ("vocabulary", 32000)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--lora", type=int, help="train adapters of this rank; the model is frozen")
    parser.add_argument("--base", default="none", help="its matrices in int8, int4 or nf4")
    return parser.parse_args()


def configuration(options: argparse.Namespace, layout: Layout) -> Config:
    """Return the configuration of the model that the options describe."""
    heads = options.hidden // 80 or 1
    model = {
        "kind": "gpt",
        "layers": options.layers,
        "hidden": options.hidden,
        "heads": heads,
        "seq_length": SEQUENCE,
    }
    run = {"run": {"steps": STEPS}, "precision": {"compute": PRECISION}}
    if options.lora is not None:
        run |= {"adapt": {"method": "lora", "rank": options.lora}}
        run |= {"quantize": {"weights": options.base}}
    return synthetic_config(layout, model, **run)


def main() -> None:
    """Measure the setting on the command line, and print the result on rank 0."""
    options = arguments()
    torch.set_num_threads(1)
    keep_freed(os.environ)
    world = World()
    layout = Layout(1, 1, world.size, zero=options.zero)
    config = configuration(options, layout)
    compute = data_types(PRECISION).compute
    some = torch.ones(256, 256, dtype=compute)
    some @ some  # this multiplication makes libraries allocate their memory before the measurement
    axes = world.split(grid_of(config))
    _, start = process_bytes()
    engine = Engine(config, axes, options.vocabulary)
    give_back()
    _, built = process_bytes()
    ids = torch.randint(options.vocabulary, (SEQUENCE + 1, 1))
    batch = Microbatch.of_ids(ids, torch.tensor([axes["data"].rank]))
    for step in range(STEPS):
        begin_s = time.perf_counter()
        engine.step(step, [batch])
        last_s = time.perf_counter() - begin_s
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    attention = USUAL.chosen("cpu", compute).attention
    kernels = {"wide_products": USUAL.widens("cpu", compute), **attention.blocks}
    memory = MemoryModel.of(config, options.vocabulary, kernels=kernels)
    foreseen = memory.peak(layout, 0, config.microbatches)
    if world.rank == 0:
        print(
            f"d={world.size} zero={options.zero}  MiB of rank 0: built, formula "
            f"{(built - start) / MIB:7.0f} {foreseen.standing / MIB:7.0f}; "
            f"peak of a step, formula {(peak - start) / MIB:7.0f} {foreseen.total / MIB:7.0f}; "
            f"the last step took {last_s:.2f} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
