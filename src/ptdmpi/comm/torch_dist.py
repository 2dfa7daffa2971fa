"""The `torch` transport, which sends tensors through process groups of torch.distributed. It works
on every device for which torch.distributed has a communication library.

The library is RCCL (which torch names "nccl") on AMD's GPUs, and gloo on the host. Each process
group has the same ranks as an MPI communicator. While torch.distributed starts, the ranks exchange
messages over MPI.
"""

import atexit
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from mpi4py import MPI
from torch import Tensor

from ptdmpi.comm.communicator import Exchanged, Handle
from ptdmpi.comm.mailbox import Mailbox
from ptdmpi.comm.routed import Pair, RoutedCommunicator
from ptdmpi.comm.store import MpiStore
from ptdmpi.config import SharedInputError

BACKENDS = {"cpu": "gloo", "cuda": "nccl"}
PATIENCE_S = 2.0  # time limit in seconds for a thread to end; normally the thread ends at once
OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}
# torch 2.13 has new names for these functions, and warns about the old names
_gather: Callable[..., Any] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


class Session:
    """A session of torch.distributed for all ranks of a world. A process has one session at a time,
    because torch allows only one."""

    now: ClassVar["Session | None"] = None
    left: ClassVar[list[MpiStore]] = []

    def __init__(self, everyone: MPI.Comm, device: torch.device) -> None:
        self.everyone = everyone
        self.device = device
        self.store = MpiStore(everyone)
        self.attendants: list[Attendant] = []
        self.made = 0  # number of groups in torch.distributed that this rank has made so far
        dist.init_process_group(
            BACKENDS[device.type],
            store=self.store,
            rank=everyone.Get_rank(),
            world_size=everyone.Get_size(),
            # Do not bind the process group to a device. If it were bound, torch would make new
            # groups by splitting it, and all ranks of the world would have to take part in each
            # split.
        )

    @classmethod
    def begin(cls, everyone: MPI.Comm, device: torch.device) -> None:
        """Begin a session for the ranks of `everyone`. Do nothing if exactly these ranks already
        have a session on `device`; close any other session first. All ranks of `everyone` call this
        method."""
        if everyone.Get_size() == 1:
            return
        known = cls.now
        fits = known is not None and known.device == device
        if known is not None and fits:
            same = (MPI.IDENT, MPI.CONGRUENT)
            fits = MPI.Comm.Compare(known.everyone, everyone) in same
        # all ranks must make the same decision, but perhaps only some of them have a session of an
        # earlier world
        if everyone.allreduce(fits, MPI.LAND):
            return
        if known is not None:
            known.close()
        cls.now = cls(everyone, device)

    def close(self) -> None:
        """End the session. The groups of the session must not be used afterwards."""
        dist.destroy_process_group()
        for attendant in self.attendants:
            attendant.end()
        self.store.leave()
        Session.left.append(self.store)
        Session.now = None

    def group(self, ranks: Sequence[int], most: Callable[[int], int]) -> dist.ProcessGroup:
        """Return a process group of the world ranks `ranks`, which must be in ascending order. Only
        the ranks of the new group call this method. `most(number)` returns the greatest `number`
        that any rank of the new group has passed to `most`."""
        # torch names a group after its ranks and the number of groups that the process has made.
        # That number must therefore be the same on all ranks of the new group. A rank that has made
        # fewer groups than other ranks first makes additional groups, each of this rank alone.
        for _ in range(most(self.made) - self.made):
            self._new([self.everyone.Get_rank()])
        return self._new(ranks)

    def _new(self, ranks: Sequence[int]) -> dist.ProcessGroup:
        self.made += 1
        # on a GPU, a group of several ranks connects immediately and uses this rank's own GPU
        device = None if self.device.type == "cpu" or len(ranks) == 1 else self.device
        group = dist.new_group(list(ranks), use_local_synchronization=True, device_id=device)
        assert isinstance(group, dist.ProcessGroup), "this rank is in it"
        return group


@atexit.register
def _end() -> None:
    # this function must run before mpi4py finalizes MPI, because the threads of the stores call MPI
    if Session.now is not None:
        Session.now.close()
    for store in Session.left:
        store.join()


class Begun:
    """A collective or message of torch.distributed that has begun."""

    def __init__(self, work: Any) -> None:
        self._work = work
        self._over = False

    def wait(self) -> None:
        """Wait for the operation. On a device only the current stream waits, not the host."""
        self._work.wait()
        self._over = True  # a reduce-scatter of gloo does not report that it is complete

    def done(self) -> bool:
        """Return True if the operation is complete."""
        return self._over or self._work.is_completed()


class Attendant:
    """A thread that waits for gloo's messages. Gloo reports that a message is complete only to a
    thread that waits for it. `Handle.done` must not wait, so this extra thread waits in its
    place."""

    def __init__(self) -> None:
        self.works: queue.SimpleQueue[tuple[Any, Future[None]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="attendant", daemon=True)
        self._thread.start()

    def attend(self, work: Any) -> "Attended":
        """Let the thread wait for the message `work`. Return a handle of the message."""
        attended = Attended()
        self.works.put((work, attended.future))
        return attended

    def end(self) -> None:
        """End the thread. The thread must end before Python exits, because Python must not exit
        while the thread runs code of torch."""
        self.works.put(None)
        self._thread.join(PATIENCE_S)

    def _run(self) -> None:
        while (waiting := self.works.get()) is not None:
            work, future = waiting
            try:
                work.wait()
            except Exception as error:  # `Attended.wait` raises this error again
                future.set_exception(error)
            else:
                future.set_result(None)


class Attended:
    """The handle of a message that an attendant thread waits for."""

    def __init__(self) -> None:
        self.future: Future[None] = Future()

    def wait(self) -> None:
        """Wait for the message; raises the error with which it failed."""
        self.future.result()

    def done(self) -> bool:
        """Return True if the message is complete."""
        return self.future.done()


class TorchCarrier:
    """The process group of torch.distributed for one group of ranks, and a further process group
    for each directed pair of pipeline neighbours."""

    def __init__(self, session: Session, control: MPI.Comm, pairs: Sequence[Pair]) -> None:
        self.session = session
        self.rank: int = control.Get_rank()
        # the world ranks of the group; they must be in ascending order, because torch sorts the
        # ranks of a group
        self.ranks: list[int] = control.allgather(session.everyone.Get_rank())
        self.whole = session.group(self.ranks, partial(control.allreduce, op=MPI.MAX))
        self.pairs = {pair: self._pair(control, pair) for pair in pairs if self.rank in pair}
        self.attendants: dict[Pair, Attendant] = {}

    def _pair(self, control: MPI.Comm, pair: Pair) -> dist.ProcessGroup:
        peer = sum(pair) - self.rank
        ranks = [self.ranks[member] for member in sorted(pair)]
        return self.session.group(
            ranks, lambda made: max(made, control.sendrecv(made, peer, source=peer))
        )

    def reaches(self, flat: Tensor) -> bool:
        """Return True if the tensor is on the device of the session."""
        return flat.device.type == self.session.device.type

    def all_reduce(self, flat: Tensor, op: str) -> Handle:
        """Begin an all-reduce of torch.distributed."""
        return Begun(dist.all_reduce(flat, OPS[op], group=self.whole, async_op=True))

    def all_gather(self, result: Tensor, flat: Tensor) -> Handle:
        """Begin an all-gather of torch.distributed."""
        return Begun(_gather(result, flat, group=self.whole, async_op=True))

    def reduce_scatter(self, result: Tensor, flat: Tensor) -> Handle:
        """Begin a reduce-scatter of torch.distributed."""
        return Begun(_scatter(result, flat, group=self.whole, async_op=True))

    def all_to_all(self, result: Tensor, flat: Tensor, parts: Exchanged) -> Handle:
        """Begin an all-to-all of torch.distributed."""
        # send bytes, because not every library supports every data type
        size = flat.element_size()
        work = dist.all_to_all_single(
            result.view(torch.uint8),
            flat.view(torch.uint8),
            [size * count for count in parts.received],
            [size * count for count in parts.sent],
            group=self.whole,
            async_op=True,
        )
        return Begun(work)

    def broadcast(self, flat: Tensor, root: int) -> Handle:
        """Begin a broadcast of torch.distributed."""
        work = dist.broadcast(flat, self.ranks[root], group=self.whole, async_op=True)
        return Begun(work)

    def isend(self, flat: Tensor, peer: int) -> Handle:
        """Begin a send of torch.distributed."""
        pair = (self.rank, peer)
        return self._begun(pair, dist.isend(flat, self.ranks[peer], group=self._of(pair)))

    def irecv(self, flat: Tensor, peer: int) -> Handle:
        """Begin a receive of torch.distributed."""
        pair = (peer, self.rank)
        return self._begun(pair, dist.irecv(flat, self.ranks[peer], group=self._of(pair)))

    def _of(self, pair: Pair) -> dist.ProcessGroup:
        return self.pairs.get(pair, self.whole)

    def _begun(self, pair: Pair, work: Any) -> Handle:
        if self.session.device.type != "cpu":
            return Begun(work)
        if pair not in self.attendants:
            self.attendants[pair] = Attendant()
            self.session.attendants.append(self.attendants[pair])
        return self.attendants[pair].attend(work)

    def pending(self) -> str:
        """Return "", because torch's own watchdog detects operations that hang."""
        return ""  # the watchdog ends a hanging operation even if no rank waits for it

    failure = pending

    def abort(self) -> None:
        """Abort all process groups of this carrier."""
        for group in (self.whole, *self.pairs.values()):
            group.abort()


class TorchCommunicator(RoutedCommunicator):
    """A group whose tensors are sent through torch.distributed."""

    def _connect(self, pairs: Sequence[Pair]) -> TorchCarrier:
        assert Session.now is not None, "opened by the world"
        return TorchCarrier(Session.now, self.control, pairs)

    @classmethod
    def open(cls, everyone: MPI.Comm, device: torch.device) -> str:
        """Start torch.distributed, once for each world. Raises SharedInputError if
        torch.distributed has no library for `device`, or if MPI has no MPI_THREAD_MULTIPLE."""
        if device.type not in BACKENDS:
            raise SharedInputError(
                f'comm.wire = "torch": no library for {device.type}; legal: {", ".join(BACKENDS)}'
            )
        if everyone.Get_size() > 1 and not Mailbox.works_in_a_thread():
            raise SharedInputError(
                'comm.wire = "torch" needs a thread that calls MPI, and this MPI has no '
                'MPI_THREAD_MULTIPLE; legal: an MPI that has it, or comm.wire = "mpi"'
            )
        Session.begin(everyone, device)
        return f"torch.distributed over {BACKENDS[device.type]}"
