"""Hangs and failures of a device, while the host is in no call that would raise them."""

import socket
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from ptdmpi.comm.traits import WireError
from ptdmpi.comm.wires import Wire
from ptdmpi.comm.world import Axes, World
from ptdmpi.plan.layout.grid import training_grid
from ptdmpi.watch import heartbeat, wires
from ptdmpi.watch.heartbeat import Heartbeat
from ptdmpi.watch.requests import StopRequest
from ptdmpi.watch.stopwatch import Place, _UnderWay
from ptdmpi.watch.whereabouts import Ranks, Seen, culprits, describe, waits_for
from tests.comm._stand_in import Marked, StandInCommunicator
from tests.parallel import parallel

GRID = training_grid(tensor=2)
RANKS = Ranks(GRID, [socket.gethostname()] * 2)


def watched(comm, folder) -> tuple[Axes, Heartbeat]:
    """Return a tensor axis of two ranks on the stand-in, and a heartbeat that is not started."""
    axes = World(comm).split(GRID, Wire(StandInCommunicator))
    return axes, Heartbeat(
        axes, RANKS, Place(), StopRequest(), directory=folder, judge=None, stall_s=60.0
    )


@parallel(ranks=[2])
@pytest.mark.parametrize("ahead", [False, True])
def test_a_rank_that_does_not_enter_an_all_reduce_is_named(comm, tmp_path, ahead):
    """Rank 1 computes; its host is there, too, or `ahead`, after the all-reduce."""
    axes, heart = watched(comm, tmp_path)
    group, ones = axes["tensor"], torch.ones(3)
    computed = Marked(group.library)
    with pytest.MonkeyPatch.context() as patched:
        if comm.rank == 1:
            patched.setattr(group.library.host, "record_event", lambda: computed)
        handle = group.all_reduce_begin(ones) if ahead or comm.rank == 0 else None
    assert group.busy == ""
    table = {rank: Seen(one, 0.0) for rank, one in enumerate(comm.allgather(heart._report()))}
    assert describe(table[0].report).endswith(", in all_reduce (tensor)")
    assert waits_for(0, table, RANKS) == [1] and culprits(table, RANKS, 0.0) == [1]
    computed.reached.set()
    (handle or group.all_reduce_begin(ones)).wait()
    assert group.pending() == "" and heart._report().collective == ""
    assert torch.equal(ones, torch.full((3,), 2.0))


@parallel(ranks=[2])
def test_a_connection_that_fails_while_the_host_waits_ends_the_wait(comm, tmp_path):
    """Rank 1 does not come, rank 0 asks nothing: its heart does, and says why if nobody else does.

    Where nobody asks, the stand-in lets it wait for 20 s, and a GPU for ever.
    """
    axes, heart = watched(comm, tmp_path)
    group = axes["tensor"]
    assert axes.failure() == ""
    comm.Barrier()
    if comm.rank == 0:
        connection = group._carrier.whole.connection
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(heartbeat, "BEAT_S", 0.05)
            patched.setattr(wires, "PATIENCE_S", 0.3)
            assert heart.start()
            handle, start_s = group.all_reduce_begin(torch.ones(3)), time.monotonic()
            threading.Timer(0.1, setattr, (connection, "failed", "RemoteError")).start()
            with pytest.raises(WireError, match="a compute waits for a message: aborted"):
                handle.wait()
            assert time.monotonic() - start_s < 10.0
            # nothing is decided on what an abort has left
            with pytest.raises(WireError, match=r"^tensor: RemoteError$") as found:
                axes.settle()
            assert heart._report().failure is None  # the main thread has its time to say so itself
            while heart._report().failure is None:
                time.sleep(0.01)
            heart.close()
        assert heart._report().failure[1].endswith("after a failure: tensor: RemoteError")
        heart.failed(found.value)
        assert heart._report().failure[1] == "WireError: tensor: RemoteError"
        heart.failed(WireError("aborted"))  # what comes of the abort says why it was
        assert heart._report().failure[1] == "WireError: aborted; tensor: RemoteError"
    comm.Barrier()


class Broken:
    """A mark of a device that raises its last error at every question."""

    def done(self) -> bool:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered\nmore")

    at_s = done


@parallel(ranks=[2])
def test_a_device_that_has_failed_does_not_end_the_watch(comm, tmp_path):
    """The rank's report has its error, and the heartbeat continues."""
    axes, heart = watched(comm, tmp_path)
    told = SimpleNamespace(asked_from_here=lambda: threads.append(threading.current_thread()))
    heart.axes, threads = replace(axes, clock=told), []
    if comm.rank == 0:
        place = heart.place
        place._under_way.append(_UnderWay(place.doing, Broken(), Broken()))
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(heartbeat, "BEAT_S", 0.05)
            assert heart.start()
            end_s = time.monotonic() + 20.0
            while not heart._failure and time.monotonic() < end_s:
                time.sleep(0.02)
            beat_s = heart._beat_s
            while heart._beat_s == beat_s and time.monotonic() < end_s:
                time.sleep(0.02)
            alive = heart._thread.is_alive()
            heart.close()
        assert alive and heart._beat_s > beat_s
        assert threads == [heart._thread]  # told whose device it asks
        said = heart._report().failure
        assert said[1] == (
            "its device: AcceleratorError: CUDA error: an illegal memory access was encountered"
        )
    comm.Barrier()
