"""A library of queues over MPI, which stands in for NCCL: with its rules, and without a device.

Each stream is a thread that works off what it is given in order. A send meets its receive before
either is over, nothing carries a tag of its own, and ranks connect by an id that one of them made.
Computes are the host's, so a stream that a compute waits for is waited for by the host. A random
delay in front of each operation stands for what a device does.
"""

import queue
import random
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from mpi4py import MPI
from torch import Tensor

from ptdmpi.comm.communicator import Exchanged
from ptdmpi.comm.nccl.library import Described
from ptdmpi.comm.nccl.wire import NcclCommunicator
from ptdmpi.comm.sums import combine
from ptdmpi.comm.traits import WireError
from ptdmpi.engine.runner import OpHook
from ptdmpi.plan.schedule.ops import Op

POLL_S = 0.0002


class Stuck(AssertionError):
    """The host has waited too long, and says for what."""


class Ended(Exception):
    """The library was aborted while it worked."""

    def __str__(self) -> str:
        return "aborted"


class Marked:
    """A mark in a stream: it is done when the stream has come to it."""

    def __init__(self, library: "StandIn") -> None:
        self.library = library
        self.reached = threading.Event()

    def query(self) -> bool:
        """Return True if the stream has reached the mark."""
        return self.reached.is_set()

    def wait(self, why: str) -> None:
        """Wait on the host. Raises Stuck after the limit, and WireError if the library failed."""
        end_s = time.perf_counter() + self.library.limit_s
        while not self.reached.wait(0.05):
            if self.library.broken:
                raise WireError(f"{why}: {self.library.broken}")
            if time.perf_counter() > end_s:
                raise Stuck(f"{why}: {self.library.state()}")


class Host:
    """The stream of the computes: what is put into it is done at once."""

    def __init__(self, library: "StandIn") -> None:
        self.library = library

    def record_event(self) -> Marked:
        """Return a mark that is reached already."""
        mark = Marked(self.library)
        mark.reached.set()
        return mark

    def wait_event(self, event: Marked) -> None:
        """Wait for a mark at once."""
        event.wait("a compute waits for a message")


class Queue:
    """A stream: a thread that does one thing after the other."""

    def __init__(self, library: "StandIn", number: int) -> None:
        self.library, self.number = library, number
        self.random = random.Random(library.rank * 1000 + number)
        self.work: queue.SimpleQueue[tuple[str, Callable[[], Any]]] = queue.SimpleQueue()
        self.now = "idle"
        threading.Thread(target=self._run, daemon=True, name=f"stream {number}").start()

    def _run(self) -> None:
        while True:
            self.now, work = self.work.get()
            try:
                work()
            except Exception as error:  # a rank is lost, say: whoever waits is told
                self.library.broken = str(error) or type(error).__name__
                return
            self.now = "idle"

    def put(self, label: str, work: Callable[[], Any]) -> None:
        """Add an operation, after a random delay."""

        def later() -> None:
            time.sleep(self.random.random() * self.library.delay_s)
            work()

        self.work.put((label, later))

    def record_event(self) -> Marked:
        """Return a mark after the work put in so far."""
        mark = Marked(self.library)
        self.work.put(("mark", mark.reached.set))
        return mark

    def wait_event(self, event: Marked) -> None:
        """Let later work wait for a mark."""
        self.work.put(("wait", lambda: self.library.until(event.reached.is_set)))


class StandIn:
    """The library on one rank. `delay_s`: the longest delay; `limit_s`: of the host's waiting."""

    def __init__(self, everyone: MPI.Comm, delay_s: float = 0.001, limit_s: float = 20.0) -> None:
        self.fabric = everyone.Dup()
        self.rank, self.delay_s, self.limit_s = everyone.Get_rank(), delay_s, limit_s
        self.streams: list[Queue] = []
        self.ids = 0
        self.ended, self.broken = False, ""
        self.under_way: list[Any] = []  # MPI may write there until the end of the process
        self.host = Host(self)
        self.elsewhere: set[int] = set()  # addresses of tensors that count as the host's

    def describe(self) -> Described:
        """Return a description of the library and its device."""
        return Described("stand-in", "nowhere", f"device {self.rank}")

    def unique_id(self) -> bytes:
        """Return a new id, with this rank's number."""
        self.ids += 1
        return f"{self.rank} {self.ids}".encode()

    def connect(self, unique_id: bytes, size: int, rank: int, name: str) -> "Connected":
        """Return a connection. All ranks meet at the maker of the id, as in NCCL's bootstrap."""
        maker, number = map(int, unique_id.split())
        tag = 1 + 1000 * maker + number
        if maker != self.rank:
            self.fabric.send((rank, self.rank), maker, tag)
            members = self.fabric.recv(source=maker, tag=tag)
        else:
            status = MPI.Status()
            here = [(rank, self.rank)]
            while len(here) < size:
                here.append(self.fabric.recv(source=MPI.ANY_SOURCE, tag=tag, status=status))
            members = [one for _, one in sorted(here)]
            for member in members:
                if member != self.rank:
                    self.fabric.send(members, member, tag)
        return Connected(self, name, tag, members, rank)

    def stream(self) -> Queue:
        """Return a new stream."""
        self.streams.append(Queue(self, len(self.streams)))
        return self.streams[-1]

    def computes_in(self) -> Host:
        """Return the stream of the computes."""
        return self.host

    def reaches(self, flat: Tensor) -> bool:
        """Return False for tensors that count as the host's."""
        return flat.data_ptr() not in self.elsewhere

    def until(self, ready: Callable[[], bool]) -> None:
        """Sleep until `ready()`; polling without pauses would take the cores from ranks that
        compute."""
        while not ready():
            if self.ended:
                raise Ended
            time.sleep(POLL_S)

    def synchronise(self) -> None:
        """Wait for all streams, as freeing memory or loading a kernel does."""
        for stream in self.streams:
            stream.record_event().wait("a device synchronisation inside of a compute")

    def state(self) -> str:
        """Return the operation of each stream, as text."""
        return ", ".join(f"stream {one.number}: {one.now}" for one in self.streams)


class Connected:
    """One communicator: the ranks of the fabric by their number in it."""

    def __init__(
        self, library: StandIn, name: str, tag: int, members: list[int], rank: int
    ) -> None:
        self.library, self.name, self.tag = library, name, tag
        self.members, self.rank = members, rank
        self.failed = ""

    def all_reduce(self, flat: Tensor, op: str, stream: Queue) -> None:
        """Begin to replace `flat` by its sum or maximum."""

        def work() -> None:
            pieces = self._exchange([flat.clone()] * len(self.members))
            combine(pieces, op, flat)

        stream.put(f"all_reduce on {self.name}", work)

    def all_gather(self, result: Tensor, flat: Tensor, stream: Queue) -> None:
        """Begin to fill `result` with all ranks' `flat`."""

        def work() -> None:
            pieces = self._exchange([flat.clone()] * len(self.members))
            result.copy_(torch.cat(pieces))

        stream.put(f"all_gather on {self.name}", work)

    def reduce_scatter(self, result: Tensor, flat: Tensor, stream: Queue) -> None:
        """Begin to fill `result` with this rank's part of the sum."""

        def work() -> None:
            pieces = self._exchange(list(flat.clone().chunk(len(self.members))))
            combine(pieces, "sum", result)

        stream.put(f"reduce_scatter on {self.name}", work)

    def all_to_all(self, result: Tensor, flat: Tensor, parts: Exchanged, stream: Queue) -> None:
        """Begin to exchange parts of `flat` and `result` with every rank."""

        def work() -> None:
            pieces = list(parts.pieces(result, flat))
            leaving, arriving = pieces[self.rank]
            arriving.copy_(leaving)
            others = [peer for peer in range(len(pieces)) if peer != self.rank]
            arrive = [self._received(pieces[k][1], k) for k in others if pieces[k][1].numel()]
            leave = [self._sent(pieces[k][0], k) for k in others if pieces[k][0].numel()]
            self._finish(arrive + leave)

        stream.put(f"all_to_all on {self.name}", work)

    def broadcast(self, flat: Tensor, root: int, stream: Queue) -> None:
        """Begin to replace `flat` by the root's."""

        def work() -> None:
            if self.rank == root:
                others = [one for one in range(len(self.members)) if one != root]
                self._finish([self._sent(flat, one) for one in others])
            else:
                self._finish([self._received(flat, root)])

        stream.put(f"broadcast on {self.name}", work)

    def send(self, flat: Tensor, peer: int, stream: Queue) -> None:
        """Begin to send `flat` to a rank."""
        stream.put(f"send on {self.name}", lambda: self._finish([self._sent(flat, peer)]))

    def receive(self, flat: Tensor, peer: int, stream: Queue) -> None:
        """Begin to receive `flat` from a rank."""
        stream.put(f"receive on {self.name}", lambda: self._finish([self._received(flat, peer)]))

    def error(self) -> str:
        """Return the failure of the connection; empty: none."""
        return self.failed

    def abort(self) -> None:
        """End all operations of the library on this rank."""
        self.failed, self.library.ended = "aborted", True

    def _exchange(self, parts: list[Tensor]) -> list[Tensor]:
        """Part k goes to member k; returns what each member has for this one."""
        pieces = [torch.empty_like(parts[self.rank]) for _ in parts]
        pieces[self.rank].copy_(parts[self.rank])
        others = [one for one in range(len(parts)) if one != self.rank]
        self._finish(
            [self._received(pieces[one], one) for one in others]
            + [self._sent(parts[one], one) for one in others]
        )
        return pieces

    def _sent(self, flat: Tensor, peer: int) -> MPI.Request:
        return self.library.fabric.Issend(_bytes(flat), self.members[peer], self.tag)

    def _received(self, flat: Tensor, peer: int) -> MPI.Request:
        return self.library.fabric.Irecv(_bytes(flat), self.members[peer], self.tag)

    def _finish(self, requests: list[MPI.Request]) -> None:
        self.library.under_way.append(requests)
        self.library.until(lambda: MPI.Request.Testall(requests))
        self.library.under_way.remove(requests)


def _bytes(flat: Tensor) -> Any:
    return flat.view(torch.uint8).numpy()


class StandInCommunicator(NcclCommunicator):
    """The `nccl` wire itself, on the stand-in."""

    @classmethod
    def load(cls, everyone: MPI.Comm, device: torch.device) -> StandIn:
        # one library in a process, as of NCCL: its threads stay
        """Return the process's library, or a new one for other ranks."""
        known = cls.library
        same = (MPI.IDENT, MPI.CONGRUENT)
        fits = isinstance(known, StandIn) and not known.ended
        fits = fits and MPI.Comm.Compare(known.fabric, everyone) in same
        return known if everyone.allreduce(fits, MPI.LAND) else StandIn(everyone)


class Pauses(OpHook):
    """A device synchronisation inside of every compute."""

    def __init__(self, library: StandIn) -> None:
        self.library = library

    def begin(self, op: Op) -> None:
        """Synchronise before the op."""
        self.library.synchronise()
