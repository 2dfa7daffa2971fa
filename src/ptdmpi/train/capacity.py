"""The memory that a rank may use for a model, and the error if this memory is too small."""

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
from ptdmpi.engine.prepare.compiling import may_compile
from ptdmpi.model.kernels import USUAL, host
from ptdmpi.model.kernels.agreement import Choice, DeviceChoice
from ptdmpi.model.kernels.choice import AttentionByProducts
from ptdmpi.model.parameters import data_types
from ptdmpi.plan.cost import relief
from ptdmpi.plan.layout.grid import grid_of

if TYPE_CHECKING:  # imported only for types, because importing this module starts MPI
    from ptdmpi.comm.world import World

CGROUPS = Path("/sys/fs/cgroup")
PROCESS = Path("/proc/self")
# An allocation may fail although the predicted memory fits into the available memory. For the
# advice in the error message, the available memory is then assumed to be at most this fraction of
# the needed memory.
FAILED_SHARE = 0.9


class Memory:
    """The memory of one rank of a run: how many bytes the rank may use, and how many bytes the
    training needs.

    `capacity_bytes` is the memory that this rank may use on its device. `step` is the predicted
    memory of a step.
    """

    def __init__(
        self, config: Config, vocab_size: int, world: "World", device: torch.device
    ) -> None:
        """Compare the available memory with the needed memory before the model is allocated. Every
        rank must create its `Memory` object at the same time, because the ranks exchange these
        numbers.

        Raises InputError, on every rank, if any node has less memory than its ranks need together,
        or if any rank needs more than its part of a GPU's memory.
        """
        self._config = config
        # without a supervisor (`ptdmpi run`), the run makes no in-memory copies of the state,
        # because no restart would load the copies
        if not is_supervised():
            self._config = config.replace("checkpoint", memory_every_steps=0)
        self._vocab_size = vocab_size
        self._world = world
        self._on_host = device.type == "cpu"
        types = data_types(config.precision.compute)
        products = (types.compute, types.iteration)
        self._wide = any(USUAL.widens(device.type, dtype) for dtype in products)
        # without compilation, one kernel computes the product for a weight's gradient and adds it
        # to the sum; a compiled graph needs memory for the separate product
        compiles = config.run.compile is True or may_compile(config, device, world.size)
        self._adds_wide = host.adds_wide(device.type) and not compiles
        self.capacity_bytes = rank_memory_bytes(device, ranks_sharing(world, device))
        # the host memory that this rank may use for state that is not on its device
        host_bytes = rank_memory_bytes(torch.device("cpu"), world.local_size)
        self._host_bytes = math.inf if self._on_host else host_bytes
        self._least_host_bytes = min(world.control.allgather(self._host_bytes))
        self.step = self._step({})
        self._require(self._fits(self.step))

    def settle(self, choice: Choice, say: Callable[[str], None]) -> Choice:
        """Return the choice of kernels `choice`, changed so that the working memory of the kernels
        fits. All ranks must call this method.

        If the memory is too small to keep the attention probabilities for the backward pass, the
        function `say` prints a line about it, and the backward pass computes the probabilities
        again. Raises InputError, on every rank, if a step with the chosen kernels still does not
        fit, for example because kernels convert 16-bit types to float32 and the copies are too
        large.
        """
        # the kernels on a GPU need no additional memory
        if isinstance(choice, DeviceChoice):
            return choice
        self._wide = self._wide or choice.half == "widened"
        attention = choice.attention
        settled = self._step(attention.blocks)
        if isinstance(attention, AttentionByProducts):
            must_forget = attention.keeps and not self._fits(settled)
            if must_forget:
                say("no memory for the attention probabilities: the backward computes them again")
                attention = replace(attention, keeps=False)
                choice = replace(choice, attention=attention)
                settled = self._step(attention.blocks)
        if settled != self.step:
            self.step = settled
            self._require(self._fits(settled))
        return choice

    def _step(self, blocks: Mapping[str, int]) -> relief.Step:
        """Return the predicted memory of a step. `blocks` has the block sizes of attention
        (`HostAttention.blocks`)."""
        step = relief.Step.of(
            self._config,
            self._vocab_size,
            kernels={"wide_products": self._wide, "adds_wide": self._adds_wide, **blocks},
            on_host=self._on_host,
            nodes=self._world.nodes,
        )
        return replace(step, host_capacity_bytes=self._least_host_bytes)

    def _fits(self, step: relief.Step) -> bool:
        """Return True if every node has as much memory as its ranks need together, and if every
        rank's part of a GPU's memory is as large as the rank needs. All ranks must call this
        method."""
        world = self._world
        pipeline_rank = grid_of(self._config).coordinates(world.rank)["pipeline"]
        peak = step.peak(pipeline_rank)
        mine = _Need(
            own=_Use(peak.total, self.capacity_bytes), host=_Use(peak.host, self._host_bytes)
        )
        needs = world.control.allgather(mine)
        # the ranks on a node share the host's memory, so add up their needs; each rank has a fixed
        # part of the memory of its GPU, so check every rank separately
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
        """If `fits` is False, raise InputError on every rank. The error message lists the memory
        that a step needs."""
        self._world.on_root(lambda: self._refuse(fits))

    def _refuse(self, fits: bool) -> None:
        if not fits:
            text = relief.explain(self.step, self.capacity_bytes)
            raise InputError(f"the model does not fit into memory\n{text}")

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """Return a context that adds a note to an out-of-memory error. The note says what the
        memory is used for, and which changes of the configuration would make the model fit.
        """
        try:
            yield
        except (MemoryError, RuntimeError) as error:
            # add a note to the exception and do not replace it, because its traceback shows which
            # tensor could not be allocated
            if _lacks_memory(error):
                # the predicted memory was available at the start, but now another program may use a
                # part of it, so assume that less is available than is needed
                needed = self.step.largest()[1].total
                had = min(self.capacity_bytes, FAILED_SHARE * needed)
                # ignore the hosts' memory, which was checked at the start, because a new check
                # would need all ranks
                step = replace(self.step, host_capacity_bytes=math.inf)
                error.add_note(relief.explain(step, had))
            raise


class _Use(NamedTuple):
    """The bytes that a rank needs on a device or a host, and the bytes that it may use there."""

    needed_bytes: float
    capacity_bytes: float


class _Need(NamedTuple):
    """The needed and the available memory of a rank. `own` is the memory of the rank's device.
    `host` is the host's memory for offloaded state and for in-memory copies of the state."""

    own: _Use
    host: _Use


def _lacks_memory(error: Exception) -> bool:
    """Return True if `error` means that an allocation of memory failed.

    On CPUs, torch raises a RuntimeError, which can be recognized only by its message.
    """
    known = isinstance(error, MemoryError | torch.OutOfMemoryError)
    return known or "can't allocate memory" in str(error) or "not enough memory" in str(error)


def ranks_sharing(world: "World", device: torch.device) -> int:
    """Return the number of ranks that share this rank's GPU. If `device` is a CPU, return the
    number of ranks that share this rank's host. Every rank must call this function.

    GPUs are identified by their UUIDs, because a site may show each rank only one GPU, always with
    the number 0.
    """
    if device.type == "cpu":
        return world.local_size
    properties = torch.get_device_module(device).get_device_properties(device)
    # The following call creates this rank's context, which occupies memory on the GPU. The
    # allgather below waits until all ranks have created their contexts. After that,
    # `rank_memory_bytes` does not count the memory of these contexts as free.
    _gpu_bytes(device)
    mine = (world.process.node, str(properties.uuid))
    return world.control.allgather(mine).count(mine)


def expected_gpus(device: torch.device, environ: Mapping[str, str] = os.environ) -> int:
    """Return the number of GPUs that the ranks on this node will have.

    The result is the larger of two numbers: the number of GPUs that this process sees, and the
    number of GPUs on the node according to Slurm. Slurm's number is needed, because Slurm may show
    each task only one GPU.
    """
    shown = int(torch.get_device_module(device).device_count())
    of_slurm = environ.get("SLURM_GPUS_ON_NODE", "")
    return max(shown, int(of_slurm)) if of_slurm.isdecimal() else shown


def expected_sharing(device: torch.device, local_ranks: int) -> int:
    """Return the maximum number of ranks that will share a GPU if `local_ranks` ranks start on this
    node. If `device` is a CPU, return the number of ranks that will share the host.

    The ranks are distributed evenly over the GPUs, so the maximum is the number of ranks divided by
    the number of GPUs, rounded up.
    """
    if device.type == "cpu":
        return local_ranks
    return -(-local_ranks // expected_gpus(device))


def rank_memory_bytes(device: torch.device, sharing: int) -> int:
    """Return the number of bytes that one rank may still allocate on a GPU or a host, if `sharing`
    ranks share the memory of this GPU or host.

    On a GPU, the result is the free memory divided by `sharing`, plus the memory that this
    process's allocator has already reserved. The memory of GPU contexts, communicators and other
    processes is not free. On a host, the result is the total memory divided by `sharing`, minus the
    resident memory of this process. If the address space of this process is limited (RLIMIT_AS),
    the result is at most the unused part of this address space. The result is 1 if no memory is
    left.
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
    """Return unused memory from glibc to the operating system, and then reset this process's peak
    of resident memory to the present value.

    Other C libraries than glibc have no function that returns unused memory.
    """
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    # some Linux kernels do not allow a reset of the peak: in this case, the recorded peak stays
    # unchanged
    with contextlib.suppress(OSError):
        (PROCESS / "clear_refs").write_text("5")


def host_memory_bytes() -> int:
    """Return the physical memory of the host in bytes. If a control group of this process has a
    lower limit, return the lowest limit."""
    limits = [int(text) for text in _limits() if text.isdigit()]
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemTotal:"):
            limits.append(int(line.split()[1]) * 1024)
    return min(limits)


def _limits() -> Iterator[str]:
    """Yield the memory limits of this process's control groups and of all their parents. Each limit
    is the text of its file: a number of bytes, or "max". Both versions of Linux control groups (1
    and 2) are supported."""
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
