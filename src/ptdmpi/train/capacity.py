"""The memory that a rank may use for a model, and the error that is raised if this memory is not
enough."""

import contextlib
import ctypes
import gc
import math
import os
import resource
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from ptdmpi.base.launched import is_supervised
from ptdmpi.config import Config, InputError
from ptdmpi.model.kernels import USUAL
from ptdmpi.model.kernels.agreement import Choice, DeviceChoice
from ptdmpi.model.kernels.choice import AttentionByProducts
from ptdmpi.model.parameters import data_types
from ptdmpi.plan.cost import relief
from ptdmpi.plan.layout.grid import grid_of

if TYPE_CHECKING:  # imported only for types, because importing this module starts MPI
    from ptdmpi.comm.world import World

CGROUPS = Path("/sys/fs/cgroup")
PROCESS = Path("/proc/self")
# An allocation may fail although the prediction says that the memory is large enough. Then the
# error message assumes that only this fraction of the needed memory is available.
FAILED_SHARE = 0.9


class Memory:
    """The memory of one rank of a run: the bytes that are available to the rank, and the bytes that
    training needs.

    `capacity_bytes` is the memory that this rank may use on its device. `step` is the predicted
    memory of a step.
    """

    def __init__(
        self, config: Config, vocab_size: int, world: "World", device: torch.device
    ) -> None:
        """Compare the available memory with the needed memory before the model is allocated. Every
        rank calls this method.

        Raises InputError, on every rank, if a node or a GPU has less memory than its ranks need.
        """
        self._config = config
        # without a supervisor, no copies of the state are made in memory, because no later start
        # would load them
        if not is_supervised():
            self._config = config.replace("checkpoint", memory_every_steps=0)
        self._vocab_size = vocab_size
        self._world = world
        self._on_host = device.type == "cpu"
        types = data_types(config.precision.compute)
        products = (types.compute, types.iteration)
        self._wide = any(USUAL.widens(device.type, dtype) for dtype in products)
        self.capacity_bytes = rank_memory_bytes(device, ranks_sharing(world, device))
        # the part of the host's memory that this rank may use for state that is not on the device
        host_bytes = rank_memory_bytes(torch.device("cpu"), world.local_size)
        self._host_bytes = math.inf if self._on_host else host_bytes
        self._least_host_bytes = min(world.control.allgather(self._host_bytes))
        self.step = self._step(self._wide)
        self._require(self._fits(self.step))

    def settle(self, choice: Choice, say: Callable[[str], None]) -> Choice:
        """Return the kernels `choice`, without kernels whose working memory does not fit into the
        memory. All ranks call this method.

        If the memory is too small to keep the attention probabilities for the backward pass, the
        backward pass computes them again, and `say` reports this. Raises InputError, on every rank,
        if the kernels convert 16-bit types to float32 and there is no memory for the float32
        copies.
        """
        # the choice of kernels on a device (GPU) needs no further memory
        if isinstance(choice, DeviceChoice):
            return choice
        self._wide = self._wide or choice.half == "widened"
        keeping = self._step(self._wide)
        attention = choice.attention
        if isinstance(attention, AttentionByProducts) and attention.keeps:
            keeping = self._step(self._wide, attention.block)
            if not self._fits(keeping):
                say("no memory for the attention probabilities: the backward computes them again")
                choice = replace(choice, attention=replace(attention, keeps=False))
                keeping = self._step(self._wide)
        if keeping != self.step:
            self.step = keeping
            self._require(self._fits(keeping))
        return choice

    def _step(self, wide: bool, kept_block: int = 0) -> relief.Step:
        """Return the predicted memory of a step.

        `wide` is True if kernels convert 16-bit types to float32. `kept_block` is the block size of
        the attention probabilities that are kept for the backward pass; 0 means that none are kept.
        """
        step = relief.Step.of(
            self._config,
            self._vocab_size,
            wide_products=wide,
            on_host=self._on_host,
            kept_block=kept_block,
            nodes=self._world.nodes,
        )
        return replace(step, host_capacity_bytes=self._least_host_bytes)

    def _fits(self, step: relief.Step) -> bool:
        """Return True if every node and every GPU has as much memory as its ranks need. All ranks
        call this method."""
        world = self._world
        pipeline_rank = grid_of(self._config).coordinates(world.rank)["pipeline"]
        peak = step.peak(pipeline_rank)
        mine = _Need(
            own=_Use(peak.total, self.capacity_bytes), host=_Use(peak.host, self._host_bytes)
        )
        needs = world.control.allgather(mine)
        # the ranks on a node share the host's memory; each rank has a fixed part of its GPU's
        # memory
        uses: dict[tuple[str, int], list[_Use]] = {}
        for rank, (process, need) in enumerate(zip(world.processes, needs, strict=True)):
            on_host = need.own if self._on_host else need.host
            uses.setdefault(("host", process.node), []).append(on_host)
            if not self._on_host:
                uses.setdefault(("GPU", rank), []).append(need.own)
        return all(
            sum(use.needed_bytes for use in shared) <= sum(use.capacity_bytes for use in shared)
            for shared in uses.values()
        )

    def _require(self, fits: bool) -> None:
        """Raise InputError on every rank if `fits` is False."""
        self._world.on_root(lambda: self._refuse(fits))

    def _refuse(self, fits: bool) -> None:
        if not fits:
            text = relief.explain(self.step, self.capacity_bytes)
            raise InputError(f"the model does not fit into memory\n{text}")

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """Return a context that adds a note to an out-of-memory error. The note lists what the
        memory is used for, and which changes of the configuration would make the model fit.
        """
        try:
            yield
        except (MemoryError, RuntimeError) as error:
            # add a note to the exception instead of raising another one, because the traceback
            # shows which tensor was allocated
            if _lacks_memory(error):
                # the memory was large enough according to the prediction, but another program may
                # use a part of it
                needed = self.step.largest()[1].total
                had = min(self.capacity_bytes, FAILED_SHARE * needed)
                # leave out the hosts' memory, which was checked at the start; a new check would
                # need all ranks
                step = replace(self.step, host_capacity_bytes=math.inf)
                error.add_note(relief.explain(step, had))
            raise


class _Use(NamedTuple):
    """The bytes that a rank needs in the memory of a device or a host, and the bytes that are
    available to the rank there.
    """

    needed_bytes: float
    capacity_bytes: float


class _Need(NamedTuple):
    """The needed and the available memory of a rank: on its own device, and on its host (for
    offloaded state and copies of the state)."""

    own: _Use
    host: _Use


def _lacks_memory(error: Exception) -> bool:
    """Return True if `error` means that an allocation of memory failed.

    On CPUs the error is a RuntimeError, and only its message distinguishes it from other errors.
    """
    known = isinstance(error, MemoryError | torch.OutOfMemoryError)
    return known or "can't allocate memory" in str(error) or "not enough memory" in str(error)


def ranks_sharing(world: "World", device: torch.device) -> int:
    """Return the number of ranks that share this rank's GPU, or, for a CPU, its host. Every rank
    calls this function.

    GPUs are compared by UUID, because a site may show each rank only one GPU, always with the same
    number.
    """
    if device.type == "cpu":
        return world.local_size
    properties = torch.get_device_module(device).get_device_properties(device)
    # The call creates this rank's context on the GPU. After all ranks have called,
    # `rank_memory_bytes` sees the memory of all contexts.
    _gpu_bytes(device)
    mine = (world.process.node, str(properties.uuid))
    return world.control.allgather(mine).count(mine)


def expected_gpus(device: torch.device, environ: Mapping[str, str] = os.environ) -> int:
    """Return the number of GPUs that ranks started on this node will have.

    The result is the larger of two numbers: the number of GPUs that this process sees, and the
    number of GPUs on the node according to Slurm. The second number is needed because Slurm may
    show each task only one GPU.
    """
    shown = int(torch.get_device_module(device).device_count())
    of_slurm = environ.get("SLURM_GPUS_ON_NODE", "")
    return max(shown, int(of_slurm)) if of_slurm.isdecimal() else shown


def expected_sharing(device: torch.device, local_ranks: int) -> int:
    """Return the maximum number of ranks that will share a GPU if `local_ranks` ranks start on this
    node. If `device` is a CPU, return the number of ranks that will share the host.

    The ranks are distributed evenly over the GPUs, so the maximum is the quotient of ranks and
    GPUs, rounded up.
    """
    if device.type == "cpu":
        return local_ranks
    return -(-local_ranks // expected_gpus(device))


def rank_memory_bytes(device: torch.device, sharing: int) -> int:
    """Return how many bytes of a GPU's or a host's memory one rank may still use, if `sharing`
    ranks share this memory.

    The result is the total memory minus the memory in use, divided among these ranks. On a GPU that
    reports its free memory, contexts, communicators and other processes count as memory in use. On
    a host, the resident memory of this process counts as memory in use.
    """
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
    """Return (free bytes of a GPU, bytes reserved by this process's allocator).

    Return (all bytes of the GPU, 0) if the device does not report its free memory.
    """
    module = torch.get_device_module(device)
    if not hasattr(module, "mem_get_info"):
        return int(module.get_device_properties(device).total_memory), 0
    return int(module.mem_get_info(device)[0]), int(module.memory_reserved(device))


def process_bytes() -> tuple[int, int]:
    """Return (bytes of address space, resident bytes) of this process."""
    page = resource.getpagesize()
    virtual_pages, resident_pages = (PROCESS / "statm").read_text().split()[:2]
    return int(virtual_pages) * page, int(resident_pages) * page


def forget_peak() -> None:
    """Reset this process's peak of resident memory to its present value.

    Before this, return free memory that the C library glibc keeps to the system. Other C libraries
    have no call for this.
    """
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    # some Linux kernels forbid this; in that case the recorded peak stays unchanged
    with contextlib.suppress(OSError):
        (PROCESS / "clear_refs").write_text("5")


def host_memory_bytes() -> int:
    """Return the physical memory of the host in bytes, or the lowest limit of this process's
    control groups if it is lower."""
    limits = [int(text) for text in _limits() if text.isdigit()]
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemTotal:"):
            limits.append(int(line.split()[1]) * 1024)
    return min(limits)


def _limits() -> Iterator[str]:
    """Yield the memory limits of this process's control groups and of their parents, for versions 1
    and 2 of Linux control groups."""
    for line in (PROCESS / "cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        base = CGROUPS
        name = "memory.max"
        if controllers:  # the files of version 1 of control groups
            base = CGROUPS / "memory"
            name = "memory.limit_in_bytes"
        place = base / path.lstrip("/")
        for folder in (place, *place.parents):
            file = folder / name
            if file.is_file():
                yield file.read_text().strip()
            if folder == base:
                break
