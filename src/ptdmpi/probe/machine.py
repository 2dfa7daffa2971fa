"""The complete measurement of a machine. The result of the measurement is a table that can be
written as a cluster file in TOML."""

import importlib
import os
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from ptdmpi.base.words import counted
from ptdmpi.comm.wires import wire_named
from ptdmpi.comm.world import World
from ptdmpi.config import InputError
from ptdmpi.config.precision import PRECISIONS
from ptdmpi.model.kernels import Kernels, agreement
from ptdmpi.model.kernels.choice import measured_choice
from ptdmpi.model.kernels.timing import quickest
from ptdmpi.model.kernels.timing.bench import Bench
from ptdmpi.model.parameters import data_types
from ptdmpi.model.tensor_parallel import TensorAxis
from ptdmpi.plan.layout.grid import training_grid
from ptdmpi.plan.machine.cluster import TRAINER
from ptdmpi.probe import collectives, kernels
from ptdmpi.probe.layers import CPU_CASES, GPU_CASES, Layers, ProbedModel
from ptdmpi.train.capacity import process_bytes, rank_memory_bytes, ranks_sharing
from ptdmpi.train.records.rates import device_name

# Starting values of the section [efficiency]. A fraction of 1 means that layers run at the full
# measured rate of single kernels. `Layers.fit` replaces the fractions with those that layers reach.
WHOLE = {
    "gemm_fraction": 1.0,
    "memory_fraction": 1.0,
    "link_fraction": 1.0,
    "link_step_s": 0.0,
    "collective_s": 0.0,
}
# A cluster file must have some rates from the data sheet that a measured cluster does not need.
# `ptdmpi probe` writes this value for them, which is so high that it limits no predicted time.
UNLIMITED = 1e15


@dataclass(frozen=True)
class Effort:
    """The sizes that a measurement uses; larger sizes take more time.

    `ways` has the sizes at which the implementations of each kernel are timed, to choose the
    fastest. If `ways` is None, no implementations are timed. On a GPU, `ways` is None, because
    `make gpu` finds the fastest implementations.
    """

    extent: kernels.Extent
    sizes_bytes: tuple[int, ...]
    cases: tuple[ProbedModel, ...]
    ways: quickest.TimedSizes | None


CPU_EFFORT = Effort(kernels.CPU, collectives.SIZES_BYTES, CPU_CASES, quickest.TimedSizes())
GPU_EFFORT = Effort(kernels.GPU, collectives.SIZES_BYTES, GPU_CASES, None)


def probe(
    world: World, precision: str, device: torch.device, effort: Effort | None = None
) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """Return the measured cluster as a table, and the findings as texts (name, value). All ranks
    call this function and get the same result. Raises ProbeError if a kernel or a message gives a
    wrong result on any rank, and InputError if the nodes have unequal numbers of ranks.
    """
    if world.local_size * world.nodes != world.size:
        raise InputError(f"{world.size} ranks on {world.nodes} nodes: start equally many on each")
    if effort is None:
        effort = CPU_EFFORT if device.type == "cpu" else GPU_EFFORT
    axes = world.split(training_grid(data=world.size), wire_named(device=device))
    bench = Bench(axes.world, device, world.local_size)
    alone = TensorAxis(axes["tensor"])
    compute = data_types(precision).compute
    extent = effort.extent
    rank_bytes = rank_memory_bytes(device, ranks_sharing(world, device))
    memory = min(bench.everyone.all_gather_object(rank_bytes))
    # `memory` does not include the program's own memory, because this memory is already in use. The
    # planner counts the program's own memory as a part of a run's memory, so it is added below.
    own_bytes = _program_bytes(compute) if device.type == "cpu" else 0
    program = max(bench.everyone.all_gather_object(own_bytes))
    own = _quickest_kernels(bench, compute, effort.ways)
    with bench.phase("products of matrices", 1 + kernels.PER_PRODUCT * len(extent.sides) ** 3):
        launch = kernels.launch_s(bench)
        gemm = kernels.products(bench, compute, extent.sides, launch)
    with bench.phase("memory, attention, norms", len(extent.stream_bytes) + kernels.OTHERS):
        stream = kernels.streams(bench, compute, extent.stream_bytes, launch)
        attention = kernels.attention(bench, compute, extent, launch)
        elementwise = kernels.elementwise(bench, alone, compute, extent, launch=launch)
    tree = {
        "name": f"probed-{world.processes[0].host}",
        "device": _device(bench, precision, gemm, stream, memory_bytes=memory + program)
        | {"kernel_s": launch, "runtime_bytes": float(program)},
        "node": _node(world),
        "software": TRAINER.model_dump()
        | {
            "gradient_bytes": PRECISIONS[precision].master.bytes,
            "overlap_pipeline": collectives.overlaps(bench, world),
            "overlap_context": axes["data"].overlaps,
            "triton": sorted(bench.kernels.triton),
            "wide_products": any(
                bench.kernels.widens(device.type, dtype) for dtype in (compute, torch.bfloat16)
            ),
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
            "messages": collectives.tables(bench, world, compute, effort.sizes_bytes),
        },
    }
    tree = Layers(bench, world, precision, effort.cases).fit(tree)
    return _rounded(tree), bench.findings


def _quickest_kernels(
    bench: Bench, dtype: torch.dtype, sizes: quickest.TimedSizes | None
) -> dict[str, Any]:
    """Choose the kernels for all later measurements with `bench`, and return the entries about them
    for the cluster file. With `sizes`, time the implementations and choose the fastest. If `sizes`
    is None (on a GPU), choose the Triton kernels that all ranks offer, and return an empty
    table."""
    if sizes is None:
        every = bench.everyone.all_gather_object(agreement.offered_in_triton(bench.device))
        bench.kernels = Kernels(triton=set(every[0]).intersection(*every))
        return {}
    with bench.phase("implementations of attention, linears and GELU", sizes.measurements(dtype)):
        entries = quickest.entries(bench, dtype, sizes)
    bench.kernels = Kernels(measured_choice(dtype, entries))
    return entries


def _program_bytes(compute: torch.dtype) -> int:
    """Return the resident memory of the trainer itself, without a model.

    The memory includes all imported modules, and everything that PyTorch loads when it first
    computes a matrix multiplication, attention and a backward pass. The result is in bytes.
    """
    importlib.import_module("ptdmpi.train.loop")
    x = torch.ones(1, 1, 32, 32, dtype=compute, requires_grad=True)
    y = F.scaled_dot_product_attention(x @ x, x, x, is_causal=True)
    torch.autograd.backward(y, torch.ones_like(y))
    return process_bytes()[1]


def _device(
    bench: Bench,
    precision: str,
    gemm: dict[str, Any],
    stream: dict[str, Any],
    *,
    memory_bytes: int,
) -> dict[str, Any]:
    """Return the section [device] of the cluster file. Rates that the measured tables replace are
    set to a very high value, so that they limit nothing."""
    if bench.device.type != "cpu":
        name = device_name(bench.device)
    else:
        cores = counted(os.cpu_count() or 1, "core")
        name = f"{cores}, {counted(torch.get_num_threads(), 'thread')} per rank"
    best = max(rate for plane in gemm["flops_per_s"] for row in plane for rate in row)
    return {
        "name": name,
        "peak_flops": {precision: best},
        "memory_bytes": float(memory_bytes),
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
    """Return a table with all numbers rounded to four digits, because measurements are less precise
    than four digits."""
    if isinstance(value, dict):
        return {key: _rounded(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_rounded(part) for part in value]
    if isinstance(value, float):
        return float(f"{value:.4g}")
    return value
