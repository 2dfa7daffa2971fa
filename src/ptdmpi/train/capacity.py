"""How much memory a rank may use for a model."""

import resource
from collections.abc import Iterator
from pathlib import Path

import torch

CGROUPS = Path("/sys/fs/cgroup")
PROCESS = Path("/proc/self")


def rank_memory_bytes(device: torch.device, local_ranks: int) -> int:
    """Of its GPU, or of the host, whose ranks share it, less what the program takes so far."""
    if device.type == "cuda":
        sharing = -(-local_ranks // torch.cuda.device_count())
        return torch.cuda.get_device_properties(device).total_memory // sharing
    page = resource.getpagesize()
    virtual, resident = (int(n) * page for n in (PROCESS / "statm").read_text().split()[:2])
    left = host_memory_bytes() // local_ranks - resident
    addresses, _ = resource.getrlimit(resource.RLIMIT_AS)
    if addresses != resource.RLIM_INFINITY:
        left = min(left, addresses - virtual)
    return max(1, left)


def host_memory_bytes() -> int:
    """Physical memory, or what a control group leaves of it."""
    limits = [int(text) for text in _limits() if text.isdigit()]
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemTotal:"):
            limits.append(int(line.split()[1]) * 1024)
    return min(limits)


def _limits() -> Iterator[str]:
    """Of this process's control groups and of all that they are in (versions 2 and 1)."""
    for line in (PROCESS / "cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        base, name = (CGROUPS, "memory.max")
        if controllers:
            base, name = CGROUPS / "memory", "memory.limit_in_bytes"
        place = base / path.lstrip("/")
        for folder in (place, *place.parents):
            file = folder / name
            if file.is_file():
                yield file.read_text().strip()
            if folder == base:
                break
