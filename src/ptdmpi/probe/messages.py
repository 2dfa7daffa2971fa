"""Times of each collective over sizes, within nodes and between them, with every result checked."""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ptdmpi.comm.communicator import Communicator
from ptdmpi.comm.wires import wire_named
from ptdmpi.comm.world import World
from ptdmpi.plan.layout.grid import training_grid
from ptdmpi.probe.bench import Bench
from ptdmpi.probe.kernels import rising

OVERLAP_BYTES, OVERLAP_S, OVERLAP_TRIALS = 1 << 20, 0.1, 3
SIZES_BYTES = tuple(1 << power for power in range(10, 25, 2))


def groups(world: World, device: torch.device) -> Iterator[tuple[Communicator, int, str]]:
    """(this rank's group, nodes it stands on, where) of each kind of group, for tensors of
    `device`; those of one kind run at once: pairs and all ranks of a node, and one rank of each
    node."""
    local, wire = world.local_size, wire_named(device=device)
    for size in sorted({2, local}):
        if 1 < size <= local and local % size == 0:
            axes = world.split(training_grid(tensor=size, data=world.size // size), wire)
            yield axes["tensor"], 1, f"{size} ranks of a node"
    if world.nodes > 1:
        axes = world.split(training_grid(tensor=local, data=world.nodes), wire)
        yield axes["data"], world.nodes, f"one rank of each of {world.nodes} nodes"


def tables(
    bench: Bench, world: World, dtype: torch.dtype, sizes: Sequence[int]
) -> list[dict[str, Any]]:
    """A table for each collective on each kind of group."""
    found: list[dict[str, Any]] = []
    kinds = list(groups(world, bench.device))
    if not kinds:
        return found
    with bench.phase("messages", len(kinds) * len(COLLECTIVES) * len(sizes)):
        for comm, nodes, where in kinds:
            found += _tables(bench, (comm, nodes, where), dtype, sizes)
    return found


def _tables(
    bench: Bench, kind: tuple[Communicator, int, str], dtype: torch.dtype, sizes: Sequence[int]
) -> Iterator[dict[str, Any]]:
    """The tables of one of the `groups`."""
    comm, nodes, where = kind
    for name, (prepare, expected) in COLLECTIVES.items():
        times = []
        for size in sizes:
            elements = max(1, size // dtype.itemsize // comm.size) * comm.size
            work = prepare(comm, _values(elements, comm.rank, dtype, bench.device))
            right = torch.equal(work(), expected(comm, elements, dtype, bench.device))
            bench.check(right, f"{name} of {size} bytes over {where}")
            times.append(bench.message_s(work))
        times = rising(times)
        yield {
            "collective": name,
            "ranks": comm.size if name != "send" else 2,
            "nodes": nodes,
            "sizes_bytes": list(sizes),
            "seconds": times,
        }
        bench.note(
            f"{name} over {where}",
            f"from {times[0] * 1e6:,.0f} us, {sizes[-1] / times[-1] / 1e9:.2f} GB/s",
        )


def overlaps(bench: Bench, world: World) -> bool:
    """Whether a message arrives while its sender computes, without a call to MPI, for that long; or
    only when the sender waits for it. It has arrived when the device says so: on a wire with queues
    the host does not wait for it."""
    wire = wire_named(device=bench.device)
    everyone = world.split(training_grid(data=world.size), wire)["data"]
    tensor = torch.ones(OVERLAP_BYTES // 4, device=bench.device)
    work = torch.ones(256, 256, device=bench.device)
    torch.mm(work, work)  # the first one loads what it needs
    peer = everyone.rank ^ 1
    late = False
    for _ in range(OVERLAP_TRIALS):
        bench.finish()
        everyone.barrier()
        end_s = time.perf_counter() + OVERLAP_S
        if peer >= everyone.size:
            continue
        if everyone.rank % 2:
            everyone.recv(tensor, peer)
            bench.finish()
            late = time.perf_counter() > end_s - OVERLAP_S / 2
        else:
            handle = everyone.isend(tensor, peer)
            while time.perf_counter() < end_s:
                torch.mm(work, work)
            handle.wait()
    overlap = not any(everyone.all_gather_object(late))
    if everyone.size > 1:
        bench.note("messages travel while the sender computes", "yes" if overlap else "no")
    return overlap


def _values(elements: int, rank: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Small whole numbers, exact in every type, different on each rank."""
    return (torch.arange(elements, device=device) % 7 + rank % 5).to(dtype)


def _sum(comm: Communicator, elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    parts = [_values(elements, rank, torch.float32, device) for rank in range(comm.size)]
    return torch.stack(parts).sum(0).to(dtype)


def _all_reduce(comm: Communicator, tensor: Tensor) -> Callable[[], Tensor]:
    result = torch.empty_like(tensor)

    def work() -> Tensor:
        # summed anew each time: sums of sums would leave the exact numbers
        return comm.all_reduce(result.copy_(tensor))

    return work


def _part(tensor: Tensor, comm: Communicator) -> Tensor:
    return tensor.chunk(comm.size)[comm.rank]


def _all_gather(comm: Communicator, tensor: Tensor) -> Callable[[], Tensor]:
    part = _part(tensor, comm).contiguous()
    return lambda: comm.all_gather(part)


def _gathered(
    comm: Communicator, elements: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    parts = (_values(elements, rank, dtype, device) for rank in range(comm.size))
    return torch.cat([part.chunk(comm.size)[i] for i, part in enumerate(parts)])


def _reduce_scatter(comm: Communicator, tensor: Tensor) -> Callable[[], Tensor]:
    return lambda: comm.reduce_scatter(tensor)


def _scattered(comm: Communicator, *rest: Any) -> Tensor:
    return _part(_sum(comm, *rest), comm)


def _broadcast(comm: Communicator, tensor: Tensor) -> Callable[[], Tensor]:
    return lambda: comm.broadcast(tensor)


def _first(comm: Communicator, elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return _values(elements, 0, dtype, device)


def _send(comm: Communicator, tensor: Tensor) -> Callable[[], Tensor]:
    """To the next rank, while a message comes from the one before."""
    behind, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    result = torch.empty_like(tensor)

    def work() -> Tensor:
        arriving = comm.irecv(result, before)
        leaving = comm.isend(tensor, behind)
        arriving.wait()
        leaving.wait()
        return result

    return work


def _of_the_one_before(
    comm: Communicator, elements: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    return _values(elements, (comm.rank - 1) % comm.size, dtype, device)


# name -> (makes the work that is timed, what it must give)
COLLECTIVES: dict[
    str,
    tuple[
        Callable[[Communicator, Tensor], Callable[[], Tensor]],
        Callable[[Communicator, int, torch.dtype, torch.device], Tensor],
    ],
] = {
    "all_reduce": (_all_reduce, _sum),
    "all_gather": (_all_gather, _gathered),
    "reduce_scatter": (_reduce_scatter, _scattered),
    "broadcast": (_broadcast, _first),
    "send": (_send, _of_the_one_before),
}
