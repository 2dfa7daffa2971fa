"""A check whether transports (`wires`) carry tensors of this machine's devices correctly. The check
calls every operation of the communicator interface. `python -m benchmarks.gpu.wires nccl`, started
by mpirun, prints JSON on rank 0."""

import json
import sys
import time
from collections.abc import Callable, Iterator

import torch
from mpi4py import MPI
from torch import Tensor

from benchmarks.gpu.programs import nccl_refusal
from ptdmpi.comm.communicator import Communicator
from ptdmpi.comm.nccl.wire import NcclCarrier, NcclCommunicator
from ptdmpi.comm.wires import wire_named
from ptdmpi.comm.world import World
from ptdmpi.config import SharedInputError
from ptdmpi.plan.layout.grid import training_grid

ELEMENTS = 100_003  # number of elements of each rank, an odd number
TYPES = (torch.float32, torch.bfloat16, torch.int64)
Check = tuple[str, Callable[[], bool]]


def values_of(rank: int, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the test values [size] of a rank. The values are small integers, whose sums are exact
    in every type and in any order."""
    return ((torch.arange(size) + 3 * rank) % 5).to(dtype).to(device)


def checks(axis: Communicator, dtype: torch.dtype, device: torch.device) -> Iterator[Check]:
    """Yield (name, function that checks the operation) for each collective operation of the group
    `axis`, on tensors of the type `dtype` on a device."""
    n = axis.size
    rank = axis.rank
    every = [values_of(other, ELEMENTS, dtype, device) for other in range(n)]
    wide = [values_of(other, n * ELEMENTS, dtype, device) for other in range(n)]
    total = torch.stack(every).sum(0).to(dtype)
    greatest = torch.stack(every).amax(0)
    mine = torch.stack(wide).sum(0).to(dtype).chunk(n)[rank]
    last = every[n - 1]

    def sums() -> bool:
        return torch.equal(axis.all_reduce(every[rank].clone()), total)

    def maxima() -> bool:
        return torch.equal(axis.all_reduce(every[rank].clone(), "max"), greatest)

    def gathers() -> bool:
        return torch.equal(axis.all_gather(every[rank]), torch.cat(every))

    def scatters() -> bool:
        return torch.equal(axis.reduce_scatter(wide[rank].clone()), mine)

    def broadcasts() -> bool:
        return torch.equal(axis.broadcast(every[rank].clone(), n - 1), last)

    def begun() -> bool:
        summed = every[rank].clone()
        sum_handle = axis.all_reduce_begin(summed)
        gathered, gather_handle = axis.all_gather_begin(every[rank])
        part, scatter_handle = axis.reduce_scatter_begin(wide[rank].clone())
        for handle in (scatter_handle, sum_handle, gather_handle):
            handle.wait()
        same = torch.equal(summed, total) and torch.equal(gathered, torch.cat(every))
        return same and torch.equal(part, mine)

    yield "all_reduce", sums
    yield "all_reduce max", maxima
    yield "all_gather", gathers
    yield "reduce_scatter", scatters
    yield "broadcast", broadcasts
    yield "begun", begun
    yield "send, receive", lambda: neighbours_hear(axis, dtype, device)


def neighbours_hear(axis: Communicator, dtype: torch.dtype, device: torch.device) -> bool:
    """Send messages of several sizes from each rank of `axis` to its right neighbour in a ring.
    Return True if the messages of the left neighbour arrive unchanged."""
    if axis.size == 1:
        return True
    right = (axis.rank + 1) % axis.size
    left = (axis.rank - 1) % axis.size
    sizes = (1, 5, ELEMENTS)
    received = [torch.empty(size, dtype=dtype, device=device) for size in sizes]
    sent = [values_of(axis.rank + k, size, dtype, device) for k, size in enumerate(sizes)]
    for outgoing, incoming in zip(sent, received, strict=True):
        # Even ranks send first, and odd ranks receive first, as in the programs of pipeline
        # schedules. If all ranks received first, each rank could wait forever for the send of its
        # neighbour.
        if axis.rank % 2 == 0:
            handles = [axis.isend(outgoing, right), axis.irecv(incoming, left)]
        else:
            handles = [axis.irecv(incoming, left), axis.isend(outgoing, right)]
        for handle in handles:
            handle.wait()
    expected = [values_of(left + k, size, dtype, device) for k, size in enumerate(sizes)]
    return all(map(torch.equal, received, expected))


def alone(device: torch.device) -> Iterator[Check]:
    """Yield (name, function that checks the operation) for NCCL operations with a communicator of a
    single rank. The trainer never makes such a communicator. These checks only show that the
    library works and leaves its inputs unchanged."""
    NcclCommunicator.open(MPI.COMM_SELF, device)
    assert NcclCommunicator.library is not None
    carrier = NcclCarrier(NcclCommunicator.library, MPI.COMM_SELF, "alone", ())
    values = values_of(1, ELEMENTS, torch.float32, device)

    def sums() -> bool:
        x = values.clone()
        carrier.all_reduce(x, "sum").wait()
        return torch.equal(x, values)

    def gathers() -> bool:
        x = torch.empty_like(values)
        carrier.all_gather(x, values).wait()
        return torch.equal(x, values)

    yield "all_reduce of one rank", sums
    yield "all_gather of one rank", gathers


def conformance(world: World, wire: str, device: torch.device) -> dict[str, object]:
    """Check the transport `wire`, and return a dictionary. The key "wrong" lists the operations
    that give wrong results, and "all_reduce_16_MiB_s" is the smallest time of an all-reduce of 16
    MiB in seconds. If a result is wrong, the dictionary also has the key "failed". All ranks return
    the same list of wrong operations.

    Raises InputError, on all ranks, if the transport cannot connect the ranks.
    """
    axes = world.split(training_grid(pipeline=world.size), wire_named(wire, device))
    # check the pipeline axis, because a transport for devices has separate connections for pairs of
    # neighbours only on this axis
    axis = axes["pipeline"]
    every = [
        (f"{name} {str(dtype).removeprefix('torch.')}", check)
        for dtype in TYPES
        for name, check in checks(axis, dtype, device)
    ]
    if world.size == 1 and wire == "nccl":
        every += alone(device)
    wrong = [name for name, check in every if not all(axis.all_gather_object(check()))]
    x = torch.ones(2**22, device=device)
    times = []
    for _ in range(5):
        axes.clock.settle()
        axis.barrier()
        begin = time.perf_counter()
        axis.all_reduce(x)
        axes.clock.settle()
        times.append(time.perf_counter() - begin)
    result: dict[str, object] = {
        "ranks": world.size,
        "checks": len(every),
        "wrong": wrong,
        "all_reduce_16_MiB_s": min(times),
        "said": axes.carried_by,
    }
    if wrong:
        result["failed"] = f"wrong: {', '.join(wrong)}"
    return result


def refusal(world: World, wire: str, device: torch.device) -> str:
    """Return the reason why a transport cannot connect these ranks on their GPUs; "" if no reason
    is known. All ranks call this function and get the same result."""
    if wire != "nccl":
        return ""
    try:
        mine = nccl_refusal(world.size, torch.get_device_module(device).device_count())
    except RuntimeError as error:  # torch's module for this device cannot count devices
        mine = f"no NCCL: {error}"
    return next(filter(None, world.control.allgather(mine)), "")


def reported(world: World, wire: str, measure: Callable[[], dict[str, object]]) -> None:
    """Call `measure` on all ranks, and print its result, or the reason why it was not called or
    failed, as JSON on rank 0."""
    device = world.device()
    why = refusal(world, wire, device)
    result: dict[str, object]
    if why:
        result = {"skipped": why}
    else:
        try:
            result = measure()
        except SharedInputError as error:
            result = {"failed": str(error)}
    if world.rank == 0:
        print(json.dumps(result), flush=True)


def main() -> None:
    """Check the transport that the command line names."""
    world = World()
    wire = sys.argv[1]
    reported(world, wire, lambda: conformance(world, wire, world.device()))


if __name__ == "__main__":
    main()
