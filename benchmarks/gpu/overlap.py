"""The overlap of communication with computation in a training with two replicas. The overlap is a
ratio of two times: the time in which a rank runs NCCL kernels and other kernels at once, divided by
the time in which the rank runs NCCL kernels. Both times come from a trace of training steps.
`python -m benchmarks.gpu.overlap nccl`, started by mpirun, prints JSON on rank 0."""

import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.training import batches, configuration, drawn_there, engine_on
from benchmarks.gpu.wires import reported
from ptdmpi.comm.world import World
from ptdmpi.model.batch import Placing

# these sizes are so large that kernels take longer than their launches, even with two ranks on one
# GPU
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
    """Return disjoint intervals, in ascending order, that together cover the same times as
    `intervals`."""
    merged: list[Interval] = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return merged


def shared(some: Iterable[Interval], others: Iterable[Interval]) -> float:
    """Return the total time that is covered both by an interval of `some` and by an interval of
    `others`."""
    others = union(others)
    return sum(
        max(0.0, min(end, last) - max(begin, first))
        for begin, end in union(some)
        for first, last in others
    )


def under_kernels(events: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the seconds for which NCCL's kernels ran, the seconds for which other kernels of the
    same rank ran at the same time, and the second number divided by the first. `events` are the
    events of a Chrome trace, with times in microseconds. If the trace has no kernel of NCCL, return
    only the reason, with the key "skipped"."""
    kernels = [event for event in events if event.get("ph") == "X" and event.get("cat") == "kernel"]
    nccl: list[Interval] = []
    others: list[Interval] = []
    for event in kernels:
        interval = (event["ts"], event["ts"] + event["dur"])
        if "nccl" in event["name"].lower():
            nccl.append(interval)
        else:
            others.append(interval)
    communication = sum(end - begin for begin, end in union(nccl))
    if not communication:
        return {"skipped": f"no kernel of NCCL among the {len(kernels)} of the trace"}
    hidden = shared(nccl, others)
    return {
        "communication_s": communication / 1e6,
        "under_kernels_s": hidden / 1e6,
        "share_under_kernels": hidden / communication,
    }


def overlap(
    world: World,
    wire: str,
    device: torch.device,
    file: Path,
    *,
    shape: dict[str, Any] = SHAPE,
    vocab_size: int = VOCAB_SIZE,
) -> dict[str, Any]:
    """Trace two training steps, after one warm-up step. Each rank of `world` trains a replica, and
    the ranks communicate over the transport `wire`.

    Rank 0 writes its trace to `file`, and returns the number of ranks, the name of the file, and
    the result of `under_kernels` for this trace. All other ranks return {}.
    """
    from torch.profiler import ProfilerActivity, profile

    config = configuration(shape, "bf16", 1, "none", ranks=world.size)
    with drawn_there():
        engine = engine_on(config, vocab_size, device, wire=wire, world=world)
    placing = Placing(device)
    first = world.rank * config.microbatches
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)

    def step(number: int) -> None:
        mine = batches(config, vocab_size, number)[first : first + config.microbatches]
        engine.step(number, placing.place(mine))
        engine.axes.clock.settle()

    step(0)
    with profile(activities=activities) as profiled:
        for number in (1, 2):
            step(number)
    if world.rank:
        return {}
    file.parent.mkdir(parents=True, exist_ok=True)
    profiled.export_chrome_trace(str(file))
    events = json.loads(file.read_text(encoding="utf-8"))["traceEvents"]
    return {"ranks": world.size, "file": file.name, **under_kernels(events)}


def main() -> None:
    """Trace training steps with the transport that the command line names."""
    world = World()
    wire = sys.argv[1]
    reported(world, wire, lambda: overlap(world, wire, world.device(), FILE))


if __name__ == "__main__":
    main()
