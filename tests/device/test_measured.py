"""What doctor and probe measure of a device: its own wire, when its work is done."""

from collections.abc import Callable
from typing import ClassVar
from unittest.mock import patch

import pytest

from ptdmpi.comm import wires
from ptdmpi.comm.clock import HOST, DeviceClock
from ptdmpi.comm.communicator import DONE
from ptdmpi.comm.mpi import MpiCommunicator
from ptdmpi.comm.wires import Wire
from ptdmpi.comm.world import World
from ptdmpi.model.kernels.timing.bench import Bench
from ptdmpi.probe import collectives, sum_check
from ptdmpi.probe.finding import MachineFinding
from tests.device import _pretend
from tests.device._pretend import is_pretended, pretended
from tests.device._seen import SEEN
from tests.device._streams import MODULE
from tests.parallel import parallel

PROCESS = "device"
pytestmark = pytest.mark.skipif(bool(_pretend.available()), reason=str(_pretend.available()))
OF_HOST = ["float32 sum", "float32 sum", "bfloat16 sum", "bfloat16 sum"]
OF_DEVICE = ["mpi float32", "mpi float32", "mpi bfloat16", "mpi bfloat16"]


def sums(comm, device) -> dict[str, list[MachineFinding]]:
    """The rows of sums, those of the host and those of the device."""
    with (
        patch.object(World, "device", lambda world: device),
        patch.object(sum_check, "ALL_REDUCE_BYTES", (1 << 10, 1 << 14)),
    ):
        found = sum_check.check_sums(World(comm))
    assert [one.name for one in found[:4]] == OF_HOST
    return {"host": found[:4], "device": found[4:]}


@parallel(ranks=[2])
def test_the_wire_that_training_takes_is_measured_too(comm):
    with pretended() as device, patch.object(DeviceClock, "settle", autospec=True) as settle:
        found = sums(comm, device)
    assert [one.name for one in found["device"]] == OF_DEVICE
    rows = found["host"] + found["device"]
    assert all(one.status == "ok" and ", right, " in one.value for one in rows)
    # the clock's own beginning; and around each sum
    assert settle.call_count == 1 + 2 * sum_check.TRIALS * len(OF_DEVICE)


@parallel(ranks=[2])
def test_a_sum_that_is_wrong_on_the_device_alone_is_bad(comm):
    right = MpiCommunicator._all_reduce

    def corrupt(axis, flat, op):
        handle = right(axis, flat, op)
        if axis.rank == 1 and is_pretended(flat):
            flat[-1] += 1
        return handle

    with pretended() as device, patch.object(MpiCommunicator, "_all_reduce", corrupt):
        found = sums(comm, device)
    assert {one.status for one in found["host"]} == {"ok"}
    assert [(one.name, one.status) for one in found["device"]] == [(n, "bad") for n in OF_DEVICE]
    assert all("WRONG on ranks 1" in one.value for one in found["device"])


@parallel(ranks=[2])
def test_a_wire_that_does_not_connect_is_bad_and_says_why(comm):
    def preferred(device):
        return "mpi" if device.type == "cpu" else "nccl", ""

    with pretended() as device, patch.object(wires, "preferred", preferred):
        host, (row,) = sums(comm, device).values()
    assert (row.name, row.status) == ("nccl wire", "bad") and {one.status for one in host} == {"ok"}
    assert "rank 0: NCCL connects NVIDIA's GPUs; this rank computes on pretend" in row.value


class Queues(MpiCommunicator):
    """A wire as of a device, on which nothing overlaps: a receive is over when the device is waited
    for, and a message leaves when its sender waits for it."""

    arriving: ClassVar[list[Callable[[], None]]] = []

    def _irecv(self, flat, peer):
        self.arriving.append(super()._irecv(flat, peer).wait)
        return DONE

    def _isend(self, flat, peer):
        return Leaves(lambda: super(Queues, self)._isend(flat, peer).wait())

    @classmethod
    def synchronise(cls, device=None):
        while cls.arriving:
            cls.arriving.pop()()


class Leaves:
    def __init__(self, work):
        self.wait = work


@parallel(ranks=[2])
def test_a_message_has_arrived_when_the_device_says_so(comm):
    """And the work beside it is the device's."""
    with (
        pretended() as device,
        patch.object(collectives, "wire_named", lambda device: Wire(Queues, HOST, device)),
        patch.object(collectives, "OVERLAP_TRIALS", 1),
        patch.object(collectives, "OVERLAP_BYTES", 64),  # so little leaves its sender at once
        patch.object(MODULE, "synchronize", Queues.synchronise),
    ):
        bench = Bench(MpiCommunicator(comm), device, comm.size)
        assert not collectives.overlaps(bench, World(comm))
        assert comm.rank == 1 or SEEN.launches["mm"] > 1
