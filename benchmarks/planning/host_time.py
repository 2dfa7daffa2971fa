"""The host's time for a layer of this trainer, as `launch_s` of a cluster file counts it.

    .venv/bin/python -m benchmarks.planning.host_time

Layers far too small to compute, on the host as the device: what is left are Python, autograd and
the library's calls. A device's launches are dearer by some microseconds.
"""

import torch
from mpi4py import MPI

from ptdmpi.comm.world import World
from ptdmpi.config.layout import Layout
from ptdmpi.plan.cost.layer import LayerTimes
from ptdmpi.plan.layout.grid import training_grid
from ptdmpi.plan.machine.cluster import load_cluster, load_model
from ptdmpi.plan.machine.kernels import Machine
from ptdmpi.probe.bench import Bench
from ptdmpi.probe.layers import Layers, ProbedModel

FEW, MANY = 2, 18  # layers; embedding and head are the same in both


def main() -> None:
    torch.set_num_threads(1)
    world = World(MPI.COMM_WORLD)
    bench = Bench(world.split(training_grid(data=1)).world, torch.device("cpu"), 1)
    cases = [ProbedModel(count, 16, 8, 8, 32, 1) for count in (FEW, MANY)]
    few, many = Layers(bench, world, "bf16", cases).taken()
    forward_s, backward_s = (
        (b - a) / (MANY - FEW)
        for a, b in ((few.forward_s, many.forward_s), (few.backward_s, many.backward_s))
    )
    machine = Machine(load_cluster("dgx-h100"), "bf16", 2)
    launches = LayerTimes(machine, load_model("l=2,h=16,a=2"), Layout(1, 1, 1)).launches
    print(f"forward {forward_s * 1e3:.3f} ms, backward {backward_s * 1e3:.3f} ms, {launches}")
    print(f"{(forward_s + backward_s) / sum(launches) * 1e6:.1f} us a launch")


if __name__ == "__main__":
    main()
