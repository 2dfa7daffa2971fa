"""Do wires carry tensors of this machine's devices? Every operation of the contract, on ranks that
mpirun has started: `python -m benchmarks.gpu.wires nccl` prints JSON on rank 0."""

import json
import re
import sys
import time
from collections.abc import Callable, Iterator

import torch
from mpi4py import MPI
from torch import Tensor

from ptdmpi.comm.communicator import Communicator
from ptdmpi.comm.nccl.library import loaded
from ptdmpi.comm.nccl.wire import NcclCarrier, NcclCommunicator
from ptdmpi.comm.wires import wire_named
from ptdmpi.comm.world import World
from ptdmpi.config import SharedInputError
from ptdmpi.inference.model import device_of
from ptdmpi.plan.layout.grid import training_grid

ELEMENTS = 100_003  # of each rank; no power of two divides it
SHARING = (2, 30)  # the first libnccl that has several ranks on one GPU
TYPES = (torch.float32, torch.bfloat16, torch.int64)
Check = tuple[str, Callable[[], bool]]


def brought(rank: int, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Small whole numbers of a rank: their sums are exact in every type, and in any order."""
    return ((torch.arange(size) + 3 * rank) % 5).to(dtype).to(device)


def checks(axis: Communicator, dtype: torch.dtype, device: torch.device) -> Iterator[Check]:
    """Each operation on tensors of a device, beside what it must leave."""
    n, rank = axis.size, axis.rank
    every = [brought(one, ELEMENTS, dtype, device) for one in range(n)]
    wide = [brought(one, n * ELEMENTS, dtype, device) for one in range(n)]
    total, widest = torch.stack(every).sum(0).to(dtype), torch.stack(wide).sum(0).to(dtype)

    def begun() -> bool:
        x, y = every[rank].clone(), wide[rank].clone()
        summed = axis.all_reduce_begin(x)
        gathered, arrived = axis.all_gather_begin(every[rank])
        part, scattered = axis.reduce_scatter_begin(y)
        for handle in (scattered, summed, arrived):
            handle.wait()
        same = torch.equal(x, total) and torch.equal(gathered, torch.cat(every))
        return same and torch.equal(part, widest.chunk(n)[rank])

    def messages() -> bool:
        if n == 1:
            return True
        right, left = (rank + 1) % n, (rank - 1) % n
        sizes = (1, 5, ELEMENTS)
        found = [torch.empty(size, dtype=dtype, device=device) for size in sizes]
        sent = [brought(rank + k, size, dtype, device) for k, size in enumerate(sizes)]
        # in one order on all ranks, as programs have them: no receive in front of what it needs
        for there, here in zip(sent, found, strict=True):
            calls = [
                lambda one=there: axis.isend(one, right),
                lambda one=here: axis.irecv(one, left),
            ]
            for handle in [call() for call in (calls if rank % 2 == 0 else reversed(calls))]:
                handle.wait()
        known = [brought(left + k, size, dtype, device) for k, size in enumerate(sizes)]
        return all(map(torch.equal, found, known))

    yield "all_reduce", lambda: torch.equal(axis.all_reduce(every[rank].clone()), total)
    greatest = torch.stack(every).amax(0)
    yield (
        "all_reduce max",
        lambda: torch.equal(axis.all_reduce(every[rank].clone(), "max"), greatest),
    )
    yield "all_gather", lambda: torch.equal(axis.all_gather(every[rank]), torch.cat(every))
    scattered = widest.chunk(n)[rank]
    yield "reduce_scatter", lambda: torch.equal(axis.reduce_scatter(wide[rank].clone()), scattered)
    last = every[n - 1]
    yield "broadcast", lambda: torch.equal(axis.broadcast(every[rank].clone(), n - 1), last)
    yield "begun", begun
    yield "send, receive", messages


def alone(device: torch.device) -> Iterator[Check]:
    """NCCL with one rank in a communicator, which the trainer never makes: that it is there at all,
    and leaves what it is given."""
    NcclCommunicator.open(MPI.COMM_SELF, device)
    assert NcclCommunicator.library is not None
    carrier = NcclCarrier(NcclCommunicator.library, MPI.COMM_SELF, "alone", ())
    given = brought(1, ELEMENTS, torch.float32, device)

    def summed() -> bool:
        x = given.clone()
        carrier.all_reduce(x, "sum").wait()
        return torch.equal(x, given)

    def gathered() -> bool:
        x = torch.empty_like(given)
        carrier.all_gather(x, given).wait()
        return torch.equal(x, given)

    yield "all_reduce of one rank", summed
    yield "all_gather of one rank", gathered


def conformance(world: World, wire: str, device: torch.device) -> dict[str, object]:
    """What is wrong of each operation on `wire` ("failed" says so, too), and how long a sum takes;
    equal on all ranks.

    Raises InputError, on all ranks, where the wire cannot connect them.
    """
    axes = world.split(training_grid(pipeline=world.size), wire_named(wire, device))
    axis = axes["pipeline"]  # its neighbours have ways of their own, where a wire gives them any
    found = [
        (f"{name} {str(dtype).removeprefix('torch.')}", check)
        for dtype in TYPES
        for name, check in checks(axis, dtype, device)
    ]
    if world.size == 1 and wire == "nccl":
        found += alone(device)
    wrong = [name for name, check in found if not all(axis.all_gather_object(check()))]
    x = torch.ones(2**22, device=device)
    times = []
    for _ in range(5):
        axes.clock.settle()
        axis.barrier()
        begin = time.perf_counter()
        axis.all_reduce(x)
        axes.clock.settle()
        times.append(time.perf_counter() - begin)
    return {
        "ranks": world.size,
        "checks": len(found),
        "wrong": wrong,
        "all_reduce_16_MiB_s": min(times),
        "said": axes.carried_by,
    } | ({"failed": f"wrong: {', '.join(wrong)}"} if wrong else {})


def too_many(ranks: int, gpus: int) -> str:
    """Why NCCL has not so many ranks on so many GPUs; empty: it has. Raises ImportError without
    `nccl4py`, ValueError for a libnccl that cannot serve."""
    version, path = loaded()
    numbers = tuple(int(one) for one in re.findall(r"\d+", version)[:2])
    if ranks <= gpus or numbers >= SHARING:
        return ""
    needed = ".".join(map(str, SHARING))
    return (
        f"libnccl {version} ({path}) has one rank on a GPU, and here are {ranks} for {gpus}: "
        f"several need libnccl {needed}"
    )


def refusal(world: World, wire: str, device: torch.device) -> str:
    """Why a wire does not connect these ranks on their GPUs, in words; empty: nothing is known that
    is against it. All ranks call it."""
    if wire != "nccl":
        return ""
    try:
        gpus = torch.get_device_module(device).device_count()
        mine = too_many(world.size, gpus)
    except (ImportError, ValueError, RuntimeError, OSError) as error:
        mine = f"no NCCL: {error}"
    return next(filter(None, world.control.allgather(mine)), "")


def reported(world: World, wire: str, measure: Callable[[], dict[str, object]]) -> None:
    """What several ranks measure on a wire as a line of JSON of rank 0, or why they do not."""
    found: dict[str, object]
    device = device_of(world)
    if why := refusal(world, wire, device):
        found = {"skipped": why}
    else:
        try:
            found = measure()
        except SharedInputError as error:
            found = {"failed": str(error)}
    if world.rank == 0:
        print(json.dumps(found), flush=True)


def main() -> None:
    world, wire = World(), sys.argv[1]
    reported(world, wire, lambda: conformance(world, wire, device_of(world)))


if __name__ == "__main__":
    main()
