"""What replicas say to each other, and how much of it lies under kernels: steps of two, as a trace:
`python -m benchmarks.gpu.overlap nccl`, which mpirun has started, prints JSON on rank 0."""

import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.training import batches, configuration, drawn_there, engine_on
from benchmarks.gpu.wires import reported
from ptdmpi.comm.world import World
from ptdmpi.inference.model import device_of
from ptdmpi.model.batch import Placing

# large enough that a layer's kernels are longer than their launches, twice on one GPU
SHAPE = {
    "kind": "llama",
    "layers": 8,
    "hidden": 2048,
    "heads": 16,
    "ffn_hidden": 5504,
    "seq_length": 1024,
}
VOCAB_SIZE = 32000
FILE = Path(__file__).parent / "results" / "trace-2-ranks.json"
Interval = tuple[float, float]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same times without any twice, in order."""
    found: list[Interval] = []
    for begin, end in sorted(intervals):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((begin, end))
    return found


def shared(some: Iterable[Interval], others: Iterable[Interval]) -> float:
    """For how long both are going on."""
    others = union(others)
    return sum(
        max(0.0, min(end, last) - max(begin, first))
        for begin, end in union(some)
        for first, last in others
    )


def under_kernels(events: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """How long kernels of NCCL ran by a Chrome trace, whose times are microseconds, and for how
    much of it others of the same rank did."""
    kernels = [one for one in events if one.get("ph") == "X" and one.get("cat") == "kernel"]
    times: dict[bool, list[Interval]] = {True: [], False: []}
    for one in kernels:
        times["nccl" in one["name"].lower()].append((one["ts"], one["ts"] + one["dur"]))
    said = sum(end - begin for begin, end in union(times[True]))
    if not said:
        return {"skipped": f"no kernel of NCCL among the {len(kernels)} of the trace"}
    hidden = shared(times[True], times[False])
    return {
        "communication_s": said / 1e6,
        "under_kernels_s": hidden / 1e6,
        "share_under_kernels": hidden / said,
    }


def overlap(
    world: World, wire: str, device: torch.device, file: Path, shape: dict[str, Any] = SHAPE
) -> dict[str, Any]:
    """Two steps behind one that warms up, of replicas on all ranks of `world`; rank 0's trace."""
    from torch.profiler import ProfilerActivity, profile

    config = configuration(shape, "bf16", 1, "none", ranks=world.size)
    with drawn_there():
        engine = engine_on(config, VOCAB_SIZE, device, wire, world)
    placing, first = Placing(device), world.rank * config.microbatches
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]

    def step(number: int) -> None:
        mine = batches(config, VOCAB_SIZE, number)[first : first + config.microbatches]
        engine.step(number, placing.place(mine))
        engine.axes.clock.settle()

    step(0)
    with profile(activities=kinds) as watched:
        for number in (1, 2):
            step(number)
    if world.rank:
        return {}
    file.parent.mkdir(parents=True, exist_ok=True)
    watched.export_chrome_trace(str(file))
    events = json.loads(file.read_text(encoding="utf-8"))["traceEvents"]
    return {"ranks": world.size, "file": file.name, **under_kernels(events)}


def main() -> None:
    world, wire = World(), sys.argv[1]
    reported(world, wire, lambda: overlap(world, wire, device_of(world), FILE))


if __name__ == "__main__":
    main()
