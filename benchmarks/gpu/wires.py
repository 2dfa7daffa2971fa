"""Do wires carry tensors of this machine's devices? Every operation of the contract, on ranks that
mpirun has started: `python -m benchmarks.gpu.wires nccl` prints JSON on rank 0."""

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

ELEMENTS = 100_003  # of each rank; no power of two divides it
TYPES = (torch.float32, torch.bfloat16, torch.int64)
Check = tuple[str, Callable[[], bool]]


def values_of(rank: int, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a rank's values [size]: small whole numbers, whose sums are exact in every type and in
    any order."""
    return ((torch.arange(size) + 3 * rank) % 5).to(dtype).to(device)


def checks(axis: Communicator, dtype: torch.dtype, device: torch.device) -> Iterator[Check]:
    """Yield a check of each collective operation on tensors of a device, by its name."""
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
    """Send messages of several sizes to the right neighbour of a ring, and return True if those of
    the left one arrive as they were sent."""
    if axis.size == 1:
        return True
    right = (axis.rank + 1) % axis.size
    left = (axis.rank - 1) % axis.size
    sizes = (1, 5, ELEMENTS)
    received = [torch.empty(size, dtype=dtype, device=device) for size in sizes]
    sent = [values_of(axis.rank + k, size, dtype, device) for k, size in enumerate(sizes)]
    for outgoing, incoming in zip(sent, received, strict=True):
        # In one order on all ranks, as programs have it: no receive comes before the send it needs.
        if axis.rank % 2 == 0:
            handles = [axis.isend(outgoing, right), axis.irecv(incoming, left)]
        else:
            handles = [axis.irecv(incoming, left), axis.isend(outgoing, right)]
        for handle in handles:
            handle.wait()
    expected = [values_of(left + k, size, dtype, device) for k, size in enumerate(sizes)]
    return all(map(torch.equal, received, expected))


def alone(device: torch.device) -> Iterator[Check]:
    """Yield checks of NCCL with one rank in a communicator, which the trainer never makes: that the
    library works at all, and leaves what it is given."""
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
    """Return which operations are wrong on `wire` (then with "failed", too), and the seconds of a
    sum of 16 MiB; the same on all ranks.

    Raises InputError, on all ranks, where the wire cannot connect them.
    """
    axes = world.split(training_grid(pipeline=world.size), wire_named(wire, device))
    axis = axes["pipeline"]  # its neighbours use the wire's own messages, where it has any
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
    """Return why a wire cannot connect these ranks on their GPUs; empty: nothing is known against
    it. Called by all ranks, and the same on all."""
    if wire != "nccl":
        return ""
    try:
        mine = nccl_refusal(world.size, torch.get_device_module(device).device_count())
    except RuntimeError as error:  # the device's module cannot count devices
        mine = f"no NCCL: {error}"
    return next(filter(None, world.control.allgather(mine)), "")


def reported(world: World, wire: str, measure: Callable[[], dict[str, object]]) -> None:
    """Print what several ranks measure on a wire, or why they do not, as JSON on rank 0."""
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
    """Check the wire that the command line names."""
    world = World()
    wire = sys.argv[1]
    reported(world, wire, lambda: conformance(world, wire, world.device()))


if __name__ == "__main__":
    main()
