"""Measure the host's time for launching a kernel of ptdmpi, which is `launch_s` in a cluster file.

    .venv/bin/python -m benchmarks.planning.host_time

The measured layers are so small that, on the CPU, almost all their time is the time of Python,
autograd and the library's calls. On a device, the launch of a kernel takes a few microseconds more
than on the CPU.
"""

import torch
from mpi4py import MPI

from ptdmpi.comm.world import World
from ptdmpi.config.layout import Layout
from ptdmpi.model.kernels.timing.bench import Bench
from ptdmpi.plan.cost.layer import LayerTimes
from ptdmpi.plan.layout.grid import training_grid
from ptdmpi.plan.machine.cluster import load_cluster, load_model
from ptdmpi.plan.machine.kernels import Machine
from ptdmpi.probe.layers import Layers, ProbedModel

# The numbers of layers of two models with the same embedding and head. The time of a layer is the
# difference between the times of the two models, divided by the difference of these numbers.
FEW = 2
MANY = 18


def main() -> None:
    """Measure the host's time, and print it for a layer and for a kernel."""
    torch.set_num_threads(1)
    world = World(MPI.COMM_WORLD)
    bench = Bench(world.split(training_grid(data=1)).world, torch.device("cpu"), 1)
    cases = [
        ProbedModel(layers=count, hidden=16, head_size=8, seq_length=8, vocab_size=32, micro_size=1)
        for count in (FEW, MANY)
    ]
    few, many = Layers(bench, world, "bf16", cases).taken()
    forward_s = (many.forward_s - few.forward_s) / (MANY - FEW)
    backward_s = (many.backward_s - few.backward_s) / (MANY - FEW)
    machine = Machine(load_cluster("dgx-h100"), "bf16", 2)
    launches = LayerTimes(machine, load_model("l=2,h=16,a=2"), Layout(1, 1, 1)).launches
    print(f"forward {forward_s * 1e3:.3f} ms, backward {backward_s * 1e3:.3f} ms, {launches}")
    print(f"{(forward_s + backward_s) / sum(launches) * 1e6:.1f} us a launch")


if __name__ == "__main__":
    main()
