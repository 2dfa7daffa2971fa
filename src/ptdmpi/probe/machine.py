"""All of a machine, measured: a cluster as a table for TOML."""

import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from ptdmpi.base.words import counted
from ptdmpi.comm.wires import wire_named
from ptdmpi.comm.world import World
from ptdmpi.config import InputError
from ptdmpi.config.precision import PRECISIONS
from ptdmpi.model.kernels import measured_ways, taken, widens
from ptdmpi.model.parameters import data_types
from ptdmpi.model.tensor_parallel import TensorAxis
from ptdmpi.plan.layout.grid import training_grid
from ptdmpi.plan.machine.cluster import TRAINER
from ptdmpi.probe import kernels, messages, ways
from ptdmpi.probe.bench import Bench
from ptdmpi.probe.layers import CPU_CASES, GPU_CASES, Layers, ProbedModel
from ptdmpi.train.capacity import process_bytes, rank_memory_bytes, ranks_sharing
from ptdmpi.train.records.rates import device_name

# What is measured is reached; `Layers.fit` finds what whole layers reach of it.
WHOLE = {
    "gemm_fraction": 1.0,
    "memory_fraction": 1.0,
    "link_fraction": 1.0,
    "link_step_s": 0.0,
    "collective_s": 0.0,
}
UNLIMITED = 1e15  # a rate that stands in a data sheet, not in a measured file


@dataclass(frozen=True)
class Effort:
    """How much is measured."""

    extent: kernels.Extent
    sizes_bytes: tuple[int, ...]
    cases: tuple[ProbedModel, ...]
    ways: ways.TimedSizes | None  # None: not timed, as on a device, whose table `make gpu` fills


CPU_EFFORT = Effort(kernels.CPU, messages.SIZES_BYTES, CPU_CASES, ways.TimedSizes())
GPU_EFFORT = Effort(kernels.GPU, messages.SIZES_BYTES, GPU_CASES, None)


def probe(
    world: World, precision: str, device: torch.device, effort: Effort | None = None
) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """(the cluster as a table, what was found in words); equal on all ranks.

    Raises ProbeError if a kernel or a message gives a wrong result anywhere, InputError if the
    nodes have unequal numbers of ranks.
    """
    if world.local_size * world.nodes != world.size:
        raise InputError(f"{world.size} ranks on {world.nodes} nodes: start as many on each node")
    if effort is None:
        effort = CPU_EFFORT if device.type == "cpu" else GPU_EFFORT
    axes = world.split(training_grid(data=world.size), wire_named(device=device))
    bench, alone = Bench(axes.world, device, world.local_size), TensorAxis(axes["tensor"])
    compute, extent = data_types(precision).compute, effort.extent
    memory = min(
        bench.everyone.all_gather_object(rank_memory_bytes(device, ranks_sharing(world, device)))
    )
    # what the program takes is not there for tensors, but is part of what a run is seen to use
    program = _program_bytes(compute) if device.type == "cpu" else 0
    program = max(bench.everyone.all_gather_object(program))
    with _quickest_ways(bench, compute, effort.ways) as own:
        with bench.phase("products of matrices", 1 + kernels.PER_PRODUCT * len(extent.sides) ** 3):
            launch = kernels.launch_s(bench)
            gemm = kernels.products(bench, compute, extent.sides, launch)
        with bench.phase("memory, attention, norms", len(extent.stream_bytes) + kernels.OTHERS):
            stream = kernels.streams(bench, compute, extent.stream_bytes, launch)
            attention = kernels.attention(bench, compute, extent, launch)
            elementwise = kernels.elementwise(bench, alone, compute, extent, launch)
        tree = {
            "name": f"probed-{world.processes[0].host}",
            "device": _device(bench, precision, gemm, stream, memory + program)
            | {"kernel_s": launch, "runtime_bytes": float(program)},
            "node": _node(world),
            "software": TRAINER.model_dump()
            | {
                "gradient_bytes": PRECISIONS[precision].master.bytes,
                "overlap_pipeline": messages.overlaps(bench, world),
                "wide_products": any(widens(device.type, k) for k in (compute, torch.bfloat16)),
            },
            "efficiency": dict(WHOLE),
            "kernels": own,
            "measured": {
                "asynchronous": device.type != "cpu",
                "step_s": 0.0,
                "update_s_per_element": 0.0,
                "gemm": gemm,
                "stream": stream,
                "attention": attention,
                "seconds_per_element": elementwise,
                "messages": messages.tables(bench, world, compute, effort.sizes_bytes),
            },
        }
        tree = Layers(bench, world, precision, effort.cases).fit(tree)
    return _rounded(tree), bench.found


@contextmanager
def _quickest_ways(
    bench: Bench, dtype: torch.dtype, sizes: ways.TimedSizes | None
) -> Iterator[dict[str, Any]]:
    """Entries of how a run is to compute here, by which all else is then measured."""
    if sizes is None:
        yield {}
        return
    with bench.phase("ways of attention and linears", sizes.measurements(dtype)):
        found = ways.entries(bench, dtype, sizes)
    with taken(measured_ways(dtype, found)):
        yield found


def _program_bytes(compute: torch.dtype) -> int:
    """Resident memory of a rank that has trained a model of no size: what the trainer imports, and
    what PyTorch loads with the first product, attention and backward pass."""
    importlib.import_module("ptdmpi.train.loop")
    x = torch.ones(1, 1, 32, 32, dtype=compute, requires_grad=True)
    y = F.scaled_dot_product_attention(x @ x, x, x, is_causal=True)
    torch.autograd.backward(y, torch.ones_like(y))
    return process_bytes()[1]


def _device(
    bench: Bench, precision: str, gemm: dict[str, Any], stream: dict[str, Any], memory: int
) -> dict[str, Any]:
    """The keys of a data sheet; what the measured tables stand for is without limit here."""
    device = bench.device
    if device.type != "cpu":
        name = device_name(device)
    else:
        name = f"{counted(os.cpu_count() or 1, 'core')}, "
        name += f"{counted(torch.get_num_threads(), 'thread')} per rank"
    best = max(rate for plane in gemm["flops_per_s"] for row in plane for rate in row)
    return {
        "name": name,
        "peak_flops": {precision: best},
        "memory_bytes": float(memory),
        "memory_bytes_per_s": stream["bytes_per_s"][-1],
        "multiprocessors": 1,
        "clock_hz": 1.0,
        "shared_bytes_per_clock": UNLIMITED,
        "exponentials_per_clock": UNLIMITED,
    }


def _node(world: World) -> dict[str, Any]:
    return {
        "devices": world.local_size,
        "link_bytes_per_s": UNLIMITED,
        "adapters": world.local_size,
        "adapter_bytes_per_s": UNLIMITED,
        "adapter_latency_s": 0.0,
        "switch_latency_s": 0.0,
        "switches": 0,
    }


def _rounded(value: Any) -> Any:
    """Four digits are more than a measurement has."""
    if isinstance(value, dict):
        return {key: _rounded(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_rounded(part) for part in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value
