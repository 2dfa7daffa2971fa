"""Profiles of a few steps: a trace of torch's profiler and a memory history, for each rank in
`run.profile_ranks`."""

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity

from ptdmpi.config import RunConfig

FOLDER = "profile"
# Maximum number of events in a snapshot of a GPU's memory. If there are more events, the oldest
# events are dropped.
MEMORY_EVENTS = 100_000


class Profile:
    """The profiler of one rank, which records a few steps. If `run.profile_steps` is "10:12", the
    profile covers steps 10 to 12.

    The profile is written to the folder `profile/` in the run directory. If the profile cannot be
    written, the profiler prints a warning, and the run continues.
    """

    def __init__(
        self, run: RunConfig, rank: int, device: torch.device, say: Callable[[str], None]
    ) -> None:
        wanted = run.profile_ranks == "all" or rank in run.profile_ranks
        self._steps = run.profiled if wanted else range(0)
        self._rank = rank
        self._device = device
        self._say = say
        self._folder = Path(run.dir) / FOLDER
        self._running: torch.profiler.profile | None = None

    @contextlib.contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Profile the work inside the `with` block if `step` (from 1) should be profiled."""
        if step in self._steps and self._running is None:
            self._begin()
        yield
        if self._running is not None and step >= self._steps[-1]:
            self._end()

    def _begin(self) -> None:
        activities = [ProfilerActivity.CPU]
        if self._device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
            torch.cuda.memory._record_memory_history(max_entries=MEMORY_EVENTS)
        self._running = torch.profiler.profile(
            activities=activities, record_shapes=True, profile_memory=True
        )
        self._running.start()

    def _end(self) -> None:
        profiler = self._running
        self._running = None
        if profiler is None:
            return
        profiler.stop()
        name = f"steps-{self._steps[0]}-{self._steps[-1]}-rank-{self._rank}"
        trace = self._folder / f"trace-{name}.json"
        try:
            self._folder.mkdir(exist_ok=True)
            profiler.export_chrome_trace(str(trace))
            memory = self._keep_memory(name, trace)
        except (OSError, RuntimeError, ValueError) as error:
            self._say(f"warning: the profile of rank {self._rank} is not kept: {error}")
            return
        self._say(f"profiled steps {self._steps[0]} to {self._steps[-1]}: {trace}, {memory}")

    def _keep_memory(self, name: str, trace: Path) -> Path:
        """Write the memory history of the profiled steps, and return the path of the file.

        On a GPU, the file is a snapshot of the device's memory, which pytorch.org/memory_viz can
        show. On a CPU, the file lists the bytes that tensors use after each allocation in the
        trace.
        """
        if self._device.type == "cuda":
            path = self._folder / f"memory-{name}.pickle"
            torch.cuda.memory._dump_snapshot(str(path))
            torch.cuda.memory._record_memory_history(enabled=None)
            return path
        path = self._folder / f"memory-{name}.json"
        path.write_text(json.dumps(memory_events(trace)), encoding="utf-8")
        return path


def memory_events(trace: Path) -> list[dict[str, Any]]:
    """Return all allocations and releases of memory in a trace, sorted by time. Each entry is a
    dict with the keys "us" (time in microseconds), "bytes" (negative for a release) and
    "total_bytes" (the new total)."""
    events = json.loads(trace.read_bytes())["traceEvents"]
    memory = [
        {"us": event["ts"], "bytes": args.get("Bytes"), "total_bytes": args.get("Total Allocated")}
        for event in events
        if event.get("name") == "[memory]" and (args := event.get("args", {}))
    ]
    return sorted(memory, key=lambda event: event["us"])
