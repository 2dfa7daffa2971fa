"""Measurements of the time of each collective, for several message sizes, within nodes and between
nodes. The result of every measured collective is compared with the right result."""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ptdmpi.comm.communicator import Communicator
from ptdmpi.comm.wires import wire_named
from ptdmpi.comm.world import World
from ptdmpi.model.kernels.timing.bench import Bench
from ptdmpi.plan.layout.grid import training_grid
from ptdmpi.probe.kernels import rising

OVERLAP_BYTES = 1 << 20
OVERLAP_S = 0.1
OVERLAP_TRIALS = 3
SIZES_BYTES = tuple(1 << power for power in range(10, 25, 2))


class MeasuredGroup(NamedTuple):
    """A group of ranks whose messages are measured. `comm` is the group's communicator on this
    rank, `nodes` is the number of nodes that the group spans, and `name` is a text for the
    report."""

    comm: Communicator
    nodes: int
    name: str


def groups(world: World, device: torch.device) -> Iterator[MeasuredGroup]:
    """Yield the groups that this rank belongs to, one of each kind: two ranks of a node, all ranks
    of a node, and one rank of each node. The communicators of the groups send tensors on `device`.
    All groups of one kind are measured at the same time."""
    local = world.local_size
    wire = wire_named(device=device)
    for size in sorted({2, local}):
        if 1 < size <= local and local % size == 0:
            axes = world.split(training_grid(tensor=size, data=world.size // size), wire)
            yield MeasuredGroup(axes["tensor"], 1, f"{size} ranks of a node")
    if world.nodes > 1:
        axes = world.split(training_grid(tensor=local, data=world.nodes), wire)
        yield MeasuredGroup(axes["data"], world.nodes, f"one rank of each of {world.nodes} nodes")


def tables(
    bench: Bench, world: World, dtype: torch.dtype, sizes: Sequence[int]
) -> list[dict[str, Any]]:
    """Return a table for each collective and each kind of group (see `groups`). The table has the
    seconds that the collective takes for each of the message sizes `sizes` (in bytes)."""
    kinds = list(groups(world, bench.device))
    if not kinds:
        return []
    measured: list[dict[str, Any]] = []
    with bench.phase("messages", len(kinds) * len(COLLECTIVES) * len(sizes)):
        for group in kinds:
            measured += _tables(bench, group, dtype, sizes)
    return measured


def _tables(
    bench: Bench, group: MeasuredGroup, dtype: torch.dtype, sizes: Sequence[int]
) -> Iterator[dict[str, Any]]:
    """Yield one table for each collective over the ranks of `group`, with the seconds for each
    size."""
    comm = group.comm
    for name, collective in COLLECTIVES.items():
        times = []
        for size in sizes:
            elements = max(1, size // dtype.itemsize // comm.size) * comm.size
            work = collective.prepare(comm, _values(elements, comm.rank, dtype, bench.device))
            expected = collective.expected(comm, elements, dtype, bench.device)
            bench.check(torch.equal(work(), expected), f"{name} of {size} bytes over {group.name}")
            times.append(bench.message_s(work))
        times = rising(times)
        yield {
            "collective": name,
            "ranks": comm.size if name != "send" else 2,
            "nodes": group.nodes,
            "sizes_bytes": list(sizes),
            "seconds": times,
        }
        bench.note(
            f"{name} over {group.name}",
            f"from {times[0] * 1e6:,.0f} us, {sizes[-1] / times[-1] / 1e9:.2f} GB/s",
        )


def overlaps(bench: Bench, world: World) -> bool:
    """Return True if a message arrives while its sender computes and makes no calls to MPI.

    Return False if the message arrives only when the sender waits for it. The receiver waits for
    its device before it reads the clock: with a transport that uses device streams, `recv` may
    return on the host before the message has arrived. Every rank calls this function and gets the
    same result. With a single rank, return True.
    """
    wire = wire_named(device=bench.device)
    everyone = world.split(training_grid(data=world.size), wire)["data"]
    tensor = torch.ones(OVERLAP_BYTES // 4, device=bench.device)
    work = torch.ones(256, 256, device=bench.device)
    torch.mm(work, work)  # the first matrix multiplication loads libraries, so it is not timed
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
    """Return a tensor of small integers. The integers differ between ranks, and every data type
    represents them exactly."""
    return (torch.arange(elements, device=device) % 7 + rank % 5).to(dtype)


def _sum(comm: Communicator, elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    parts = [_values(elements, rank, torch.float32, device) for rank in range(comm.size)]
    return torch.stack(parts).sum(0).to(dtype)


def _all_reduce(comm: Communicator, tensor: Tensor) -> Callable[[], Tensor]:
    result = torch.empty_like(tensor)

    def work() -> Tensor:
        """All-reduce a new copy of the test values: repeated sums of the same tensor would become
        too large to be exact."""
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


def _scattered(
    comm: Communicator, elements: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    return _part(_sum(comm, elements, dtype, device), comm)


def _broadcast(comm: Communicator, tensor: Tensor) -> Callable[[], Tensor]:
    return lambda: comm.broadcast(tensor)


def _first(comm: Communicator, elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return _values(elements, 0, dtype, device)


def _send(comm: Communicator, tensor: Tensor) -> Callable[[], Tensor]:
    """Return a function that sends `tensor` to the next rank while it receives a tensor from the
    previous rank."""
    following = (comm.rank + 1) % comm.size
    previous = (comm.rank - 1) % comm.size
    result = torch.empty_like(tensor)

    def work() -> Tensor:
        """Send the tensor, and return the tensor from the previous rank."""
        arriving = comm.irecv(result, previous)
        leaving = comm.isend(tensor, following)
        arriving.wait()
        leaving.wait()
        return result

    return work


def _of_previous(
    comm: Communicator, elements: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    return _values(elements, (comm.rank - 1) % comm.size, dtype, device)


class MeasuredCollective(NamedTuple):
    """A collective operation that is measured. `prepare` returns the function that is timed, and
    `expected` returns the right result of this function."""

    prepare: Callable[[Communicator, Tensor], Callable[[], Tensor]]
    expected: Callable[[Communicator, int, torch.dtype, torch.device], Tensor]


COLLECTIVES = {
    "all_reduce": MeasuredCollective(_all_reduce, _sum),
    "all_gather": MeasuredCollective(_all_gather, _gathered),
    "reduce_scatter": MeasuredCollective(_reduce_scatter, _scattered),
    "broadcast": MeasuredCollective(_broadcast, _first),
    "send": MeasuredCollective(_send, _of_previous),
}
