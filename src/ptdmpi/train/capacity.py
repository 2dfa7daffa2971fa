"""How much memory a rank may use for a model, and what is said when that is not enough."""

import contextlib
import ctypes
import gc
import math
import os
import resource
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ptdmpi.config import Config, InputError
from ptdmpi.model.kernels import widens
from ptdmpi.model.kernels.choice import Ways, host_ways, written
from ptdmpi.model.parameters import data_types
from ptdmpi.plan.cost import relief
from ptdmpi.plan.layout.grid import grid_of

if TYPE_CHECKING:  # it starts MPI
    from ptdmpi.comm.world import World

CGROUPS = Path("/sys/fs/cgroup")
PROCESS = Path("/proc/self")
FAILED_SHARE = 0.9  # of what is needed: a rank that could not get all of it may have had so much


class Memory:
    """The memory of one rank of a run: what it may use, and what the model will take. Made by all
    ranks together, before any of it is allocated.

    Raises InputError on every rank if a node cannot hold what its ranks need.
    """

    def __init__(
        self, config: Config, vocab_size: int, world: "World", device: torch.device
    ) -> None:
        self._asked, self._world, self._on_host = (config, vocab_size), world, device.type == "cpu"
        types = data_types(config.precision.compute)
        self._wide = any(widens(device.type, one) for one in (types.compute, types.iteration))
        self.capacity_bytes = rank_memory_bytes(device, ranks_sharing(world, device))
        # for what is offloaded from a device
        host_bytes = rank_memory_bytes(torch.device("cpu"), world.local_size)
        self._host_bytes = math.inf if self._on_host else host_bytes
        self._least_host_bytes = min(world.control.allgather(self._host_bytes))
        self.step = self._step(self._wide)
        self._require(self._fits(self.step))

    def settle(self, ways: Ways, say: Callable[[str], None]) -> dict[str, list[str]]:
        """The kernels that a run has chosen, as far as memory holds what they need: probabilities
        of attention are computed again, to the same bits, where it does not hold them, and `say` is
        told. Raises InputError on every rank where half types are to be widened, as before, and
        there is no room for it."""
        taken = {kind: list(found) for kind, found in ways.items()}
        if "half" not in ways:  # of a device
            return taken
        settled = host_ways(ways)
        self._wide = self._wide or settled.widened
        keeping = self._step(self._wide, settled.block * settled.keeps)
        if settled.keeps and not self._fits(keeping):
            say("no room for the probabilities of attention: they are computed again")
            taken |= {"attention": written(settled._replace(keeps=False))["attention"]}
            keeping = self._step(self._wide)
        if keeping != self.step:
            self.step = keeping
            self._require(self._fits(keeping))
        return taken

    def _step(self, wide: bool, kept_block: int = 0) -> relief.Step:
        step = relief.Step.of(*self._asked, wide, self._on_host, kept_block)
        return replace(step, host_capacity_bytes=self._least_host_bytes)

    def _fits(self, step: relief.Step) -> bool:
        """Whether every node holds what its ranks need; all ranks ask together."""
        config, _ = self._asked
        world = self._world
        pipeline_rank = grid_of(config).coordinates(world.rank)["pipeline"]
        peak = step.peak(pipeline_rank)
        mine = ((peak.total, self.capacity_bytes), (peak.host, self._host_bytes))
        found = world.control.allgather(mine)
        # ranks share their host's memory, and have a GPU's for themselves
        groups: dict[tuple[str, int], list[tuple[float, float]]] = {}
        for rank, (process, (own, on_host)) in enumerate(zip(world.processes, found, strict=True)):
            groups.setdefault(("host", process.node), []).append(own if self._on_host else on_host)
            if not self._on_host:
                groups.setdefault(("GPU", rank), []).append(own)
        return all(sum(n for n, _ in g) <= sum(has for _, has in g) for g in groups.values())

    def _require(self, fits: bool) -> None:
        self._world.on_root(lambda: self._refuse(fits))

    def _refuse(self, fits: bool) -> None:
        if not fits:
            text = relief.explain(self.step, self.capacity_bytes)
            raise InputError(f"the model does not fit into memory\n{text}")

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """An exception for lack of memory gets a note of what fills it and which changes would
        fit."""
        try:
            yield
        except (MemoryError, RuntimeError) as error:
            # a note, not another exception: which tensor it was stands in the traceback
            if _lacks_memory(error):
                # something else has the rest of what this rank could have used
                needed = self.step.largest()[1].total
                had = min(self.capacity_bytes, FAILED_SHARE * needed)
                # hosts have been asked, of which ranks share one
                step = replace(self.step, host_capacity_bytes=math.inf)
                error.add_note(relief.explain(step, had))
            raise


def _lacks_memory(error: Exception) -> bool:
    """CPU allocations fail with a RuntimeError that only its words tell from others."""
    known = isinstance(error, MemoryError | torch.OutOfMemoryError)
    return known or "can't allocate memory" in str(error) or "not enough memory" in str(error)


def ranks_sharing(world: "World", device: torch.device) -> int:
    """How many ranks have this rank's GPU, or its host. GPUs are told apart by their UUID: a site
    may show each rank one of several, all of them by the same number. Every rank calls it."""
    if device.type == "cpu":
        return world.local_size
    properties = torch.get_device_module(device).get_device_properties(device)
    # asking makes this rank's context: once all have answered, `rank_memory_bytes` sees all of them
    _gpu_bytes(device)
    mine = (world.process.node, str(properties.uuid))
    return world.control.allgather(mine).count(mine)


def expected_gpus(device: torch.device, environ: Mapping[str, str] = os.environ) -> int:
    """How many GPUs ranks to be started here have: those that this process is shown, or more by
    Slurm, which may show each task one of them."""
    shown = int(torch.get_device_module(device).device_count())
    of_slurm = environ.get("SLURM_GPUS_ON_NODE", "")
    return max(shown, int(of_slurm)) if of_slurm.isdecimal() else shown


def expected_sharing(device: torch.device, local_ranks: int) -> int:
    """As `ranks_sharing`, of so many ranks to be started here: they take GPUs in turn, so the
    fullest one has the rounded share."""
    if device.type == "cpu":
        return local_ranks
    return -(-local_ranks // expected_gpus(device))


def rank_memory_bytes(device: torch.device, sharing: int) -> int:
    """Memory of its GPU, or of the host, as one of so many ranks, less what is taken so far: of a
    GPU by contexts, buffers of communicators and other processes, where the device tells what is
    free."""
    if device.type != "cpu":
        free, own = _gpu_bytes(device)
        return max(1, free // sharing + own)
    virtual, resident = process_bytes()
    left = host_memory_bytes() // sharing - resident
    addresses, _ = resource.getrlimit(resource.RLIMIT_AS)
    if addresses != resource.RLIM_INFINITY:
        left = min(left, addresses - virtual)
    return max(1, left)


def _gpu_bytes(device: torch.device) -> tuple[int, int]:
    """(what nobody has of a GPU, what this process's allocator has, for tensors that are there or
    come); all of it and 0 where the device does not tell."""
    module = torch.get_device_module(device)
    if not hasattr(module, "mem_get_info"):
        return int(module.get_device_properties(device).total_memory), 0
    return int(module.mem_get_info(device)[0]), int(module.memory_reserved(device))


def process_bytes() -> tuple[int, int]:
    """(addresses, resident memory) of this process so far."""
    page = resource.getpagesize()
    virtual, resident = (int(n) * page for n in (PROCESS / "statm").read_text().split()[:2])
    return virtual, resident


def forget_peak() -> None:
    """Let the most that this process has had resident begin anew with what it has now, once the C
    library has given back what is free (glibc keeps it; others have no such call)."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    with contextlib.suppress(OSError):  # a kernel that does not let it; then the peak stays
        (PROCESS / "clear_refs").write_text("5")


def host_memory_bytes() -> int:
    """Physical memory, or what a control group leaves of it."""
    limits = [int(text) for text in _limits() if text.isdigit()]
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemTotal:"):
            limits.append(int(line.split()[1]) * 1024)
    return min(limits)


def _limits() -> Iterator[str]:
    """Limits of this process's control groups and of all that they are in (versions 2 and 1)."""
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
