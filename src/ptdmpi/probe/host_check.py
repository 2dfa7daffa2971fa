"""Checks of the machine: MPI, launcher, devices, transports, threads, and the tensor-parallel sizes
for which every tensor group stays inside a node."""

import os
import platform

import torch
from mpi4py import MPI

from ptdmpi.base.words import counted
from ptdmpi.comm.nccl import library
from ptdmpi.comm.wires import preferred
from ptdmpi.comm.world import World
from ptdmpi.model.kernels import USUAL, compiler
from ptdmpi.model.kernels.host import HALF_TYPES
from ptdmpi.plan.layout.grid import training_grid
from ptdmpi.probe.finding import MachineFinding
from ptdmpi.train.capacity import ranks_sharing
from ptdmpi.train.records.rates import device_name, known_peak

# environment variable that only one launcher sets -> name of this launcher
LAUNCHERS = {
    "OMPI_COMM_WORLD_SIZE": "mpirun (Open MPI)",
    "SLURM_STEP_ID": "srun (Slurm)",
    "PALS_NRANKS": "mpiexec (PALS)",
    "PMI_SIZE": "mpiexec (MPICH)",
}
NO_LAUNCHER = "none: one process; start with mpirun or srun"


def check_host(world: World) -> list[MachineFinding]:
    """Return the findings about the machine, collected from all ranks. All ranks call this function
    together."""
    return [*_launch(world), *_software(world), _tensor_axis(world)]


def _launch(world: World) -> list[MachineFinding]:
    library = MPI.Get_library_version().replace("\0", "").splitlines()[0].partition(",")[0]
    version = ".".join(str(number) for number in MPI.Get_version())
    launcher = next((name for key, name in LAUNCHERS.items() if key in os.environ), NO_LAUNCHER)
    threads = MachineFinding("MPI threads", "multiple")
    if MPI.Query_thread() != MPI.THREAD_MULTIPLE:
        text = "not multiple, which the heartbeat thread needs"
        threads = MachineFinding("MPI threads", text, "bad")
    return [
        MachineFinding("MPI", f"{library.strip()}, MPI {version}"),
        threads,
        MachineFinding("launcher", launcher),
        MachineFinding("ranks", _ranks(world)),
    ]


def _ranks(world: World) -> str:
    """Return a text with the number of ranks, of nodes, and of ranks on each node."""
    first_of_node = world.local_rank == 0
    every = world.control.allgather((world.local_size, first_of_node))
    counts = [local_size for local_size, first in every if first]
    spread = f"{min(counts)}"
    if min(counts) != max(counts):
        spread = f"{min(counts)} to {max(counts)}"
    return f"{world.size} on {counted(world.nodes, 'node')}, {spread} per node"


def _software(world: World) -> list[MachineFinding]:
    on_gpu = torch.cuda.is_available()
    device = _gpus(world) if on_gpu else f"CPU ({platform.machine()})"
    return [
        MachineFinding("Python, PyTorch", f"{platform.python_version()}, {torch.__version__}"),
        MachineFinding("device", device),
        *_products(),
        check_wires(world),
        _threads(world),
        _compiler(world, "cuda" if on_gpu else "cpu"),
    ]


def _products() -> list[MachineFinding]:
    """Return the findings about how this CPU multiplies fp16 and bf16 matrices."""
    findings = []
    for dtype in HALF_TYPES:
        name = str(dtype).removeprefix("torch.")
        value = "through float32" if USUAL.widens("cpu", dtype) else "native"
        findings.append(MachineFinding(f"{name} products", value))
    return findings


def _threads(world: World) -> MachineFinding:
    cores = len(os.sched_getaffinity(0))
    threads = torch.get_num_threads()
    value = f"{threads}, {counted(cores, 'core')} usable by a rank"
    # `cores` counts the cores that all ranks of a node share, so compare it with the threads of all
    # these ranks
    if any(world.control.allgather(world.local_size * threads > cores)):
        crowded = f"{value}; more ranks and threads than cores: slow"
        return MachineFinding("threads per rank", crowded, "note")
    return MachineFinding("threads per rank", value)


def _compiler(world: World, device_type: str) -> MachineFinding:
    every = world.control.allgather(compiler.missing(device_type))
    for rank, missing in enumerate(every):
        if missing:
            return MachineFinding("run.compile", f"not here: rank {rank} has no {missing}")
    return MachineFinding("run.compile", "every rank can compile layers")


def _gpus(world: World) -> str:
    """Return a text with the name of this rank's GPU, the GPU's peak rate if the rate is known, and
    the number of ranks that share the GPU."""
    device = world.device()
    sharing = ranks_sharing(world, device)
    name = device_name(device)
    peak = known_peak(name, "bf16")
    rate = "unknown peak, so no MFU"
    if peak is not None:
        rate = f"bf16 peak {peak / 1e12:g} TFLOP/s"
    shared = "" if sharing == 1 else f"; one for {counted(sharing, 'rank')}"
    return f"{name}, {rate}{shared}"


def check_wires(world: World) -> MachineFinding:
    """Return a finding about the transports and the NCCL library. The status is "bad" if the ranks
    do not all have the same NCCL library."""
    libraries = sorted(set(world.control.allgather(library.description())))
    same = len(libraries) == 1
    nccl = libraries[0] if same else f"ranks differ: {'; '.join(libraries)}"
    wire, _ = preferred(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    value = f"mpi, torch, nccl: {nccl}; auto takes {wire}"
    return MachineFinding("wires", value, "ok" if same else "bad")


def _tensor_axis(world: World) -> MachineFinding:
    """Return a finding with the tensor-parallel sizes t for which every tensor group is inside a
    node."""
    inside = []
    for tensor in range(1, world.size + 1):
        if world.size % tensor == 0:
            grid = training_grid(tensor=tensor, data=world.size // tensor)
            if not world.tensor_axis_crosses_nodes(grid):
                inside.append(str(tensor))
    return MachineFinding("tensor axis", f"stays in a node for t = {', '.join(inside)}")
