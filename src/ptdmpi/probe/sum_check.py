"""A check of all-reduce against a known sum, for tensors on the host and on the device."""

import time

import torch

from ptdmpi.base.say import note
from ptdmpi.comm import wires
from ptdmpi.comm.communicator import Communicator
from ptdmpi.comm.world import World
from ptdmpi.config import InputError, SharedInputError
from ptdmpi.plan.layout.grid import training_grid
from ptdmpi.probe.finding import MachineFinding

ALL_REDUCE_BYTES = (4 * 1024, 16 * 1024 * 1024)
TRIALS = 5
# The period of the summed numbers. It is small, so that every data type represents sums over many
# ranks exactly.
PERIOD = 7


def check_sums(world: World) -> list[MachineFinding]:
    """Check all-reduces of tensors on the host, over all ranks. If the ranks have GPUs, also check
    all-reduces of tensors on the GPUs, with the transport that training uses.

    All ranks call this function together and get the same findings.
    """
    findings = _sums(world, wires.wire_named(), "{} sum")
    device = world.device()
    if device.type != "cpu":
        wire, _ = wires.preferred(device)
        findings += _sums(world, wires.wire_named(device=device), wire + " {}")
    return findings


def _sums(world: World, wire: wires.Wire, name: str) -> list[MachineFinding]:
    """Return a finding for each data type and size, or a single finding if the transport cannot
    connect the ranks.

    `name` is a format string with one field, for the data type.
    """
    wrong = ""
    comm = None
    try:
        comm = world.split(training_grid(data=world.size), wire)["data"]
    except InputError as error:
        wrong = str(error)
        # print the reason now, because the next call waits for all ranks, and may never return
        if not isinstance(error, SharedInputError):
            note(f"rank {world.rank}: {wrong}")
    failures = [failure for failure in world.control.allgather(wrong) if failure]
    if failures:
        return [MachineFinding(name.format("wire"), failures[0], "bad")]
    assert comm is not None, "it has connected"
    return _measured_sums(world, comm, wire.device, name)


def _measured_sums(
    world: World, comm: Communicator, device: torch.device, name: str
) -> list[MachineFinding]:
    findings = []
    for dtype in (torch.float32, torch.bfloat16):
        row = name.format(str(dtype).removeprefix("torch."))
        for size in ALL_REDUCE_BYTES:
            right, seconds = sum_of_known(comm, size // dtype.itemsize, dtype, device)
            is_right = world.control.allgather(right)
            if not all(is_right):
                ranks = [str(rank) for rank in range(world.size) if not is_right[rank]]
                value = f"{size / 2**20:g} MiB: WRONG on ranks {', '.join(ranks)}"
                findings.append(MachineFinding(row, value, "bad"))
                continue
            # in an all-reduce over n ranks, each rank sends at least 2 (n - 1) / n times the bytes
            # of the tensor (Thakur et al. 2005)
            rate = 2 * (world.size - 1) / world.size * size / seconds
            value = f"{size / 2**20:g} MiB in {seconds * 1e3:.3g} ms, right"
            if world.size > 1:
                value += f", {rate / 1e9:.3g} GB/s per rank"
            findings.append(MachineFinding(row, value))
    return findings


def sum_of_known(
    comm: Communicator, elements: int, dtype: torch.dtype, device: torch.device
) -> tuple[bool, float]:
    """All-reduce numbers with a known sum over the ranks of `comm`, several times.

    Returns two values: True if every element of the sum is right on this rank, and the seconds of
    the fastest trial. The time of a trial is the time of its slowest rank. Rank r contributes the
    number (r + i) mod PERIOD at index i, so neighbouring indices and neighbouring ranks have
    different numbers.
    """
    places = torch.arange(elements)
    given = ((places + comm.rank) % PERIOD).to(dtype).to(device)
    expected = torch.zeros(elements, dtype=torch.float32)
    for rank in range(comm.size):
        expected += (places + rank) % PERIOD
    # bfloat16 represents integers up to 256 exactly. A greater sum is rounded once here, as it is
    # in the all-reduce.
    expected = expected.to(dtype)
    right = True
    best_s = float("inf")
    for _ in range(TRIALS):
        tensor = given.clone()
        # wait for earlier work of the device, so that only the all-reduce is timed
        comm.clock.settle()
        comm.barrier()
        start_s = time.perf_counter()
        comm.all_reduce(tensor)
        comm.clock.settle()
        best_s = min(best_s, time.perf_counter() - start_s)
        right = right and torch.equal(tensor.cpu(), expected)
    return right, max(comm.all_gather_object(best_s))
