"""Who may run beside whom: vector clocks over ranges of memory, across the streams of a stand-in.

Every kernel that a rank puts into its compute stream and every operation of the wire is booked with
the bytes that it reads and writes. Two that touch the same bytes, one of them writing, race unless
an event stands between them (Lamport 1978; as torch.cuda._sanitizer, which knows whole tensors).
"""

import traceback
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from mpi4py import MPI
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ptdmpi.comm.nccl.wire import Queued
from tests.comm._stand_in import Connected, Host, Marked, Queue, StandIn

COMPUTE, HOST = "compute", "host"
Clock = Mapping[str, int]


@dataclass(frozen=True)
class Access:
    """One touch of bytes [begin, end), at a time of its stream."""

    stream: str
    time: int
    writes: bool
    name: str
    begin: int
    end: int

    def overlaps(self, begin: int, end: int) -> bool:
        """Return True if the access has bytes in common with [begin, end)."""
        return self.begin < end and begin < self.end


class Books:
    """What each stream has seen of the others, and who touched which memory when."""

    def __init__(self) -> None:
        self.clocks: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
        # address of a storage -> the newest access of each stream, kind and range
        self.touched: dict[int, dict[tuple[str, bool, int, int], Access]] = defaultdict(dict)
        self.beside: list[Access] = []  # of other streams than the computes', not yet seen there
        self.races: list[str] = []
        self.kernels = 0

    def mark(self, stream: str) -> Clock:
        """Return the clock of a stream: the times of all streams that it has seen."""
        return dict(self.clocks[stream])

    def join(self, stream: str, mark: Clock) -> None:
        """Let all later work of `stream` come after `mark`."""
        seen = self.clocks[stream]
        for other, time in mark.items():
            seen[other] = max(seen[other], time)

    def launch(
        self, name: str, stream: str, reads: Iterable[Tensor] = (), writes: Iterable[Tensor] = ()
    ) -> None:
        """A kernel, put into `stream` by the host."""
        self.join(stream, self.clocks[HOST])  # what the host knows to be over is over
        seen = self.clocks[stream]
        seen[stream] += 1
        self.kernels += 1
        for tensors, writing in ((reads, False), (writes, True)):
            for one in tensors:
                if not one.is_contiguous() and stream != COMPUTE:
                    self._race(f"{name} sends memory, and the tensor has gaps")
                if one.numel():
                    self._touch(name, stream, writing, one)

    def _touch(self, name: str, stream: str, writing: bool, tensor: Tensor) -> None:
        storage, begin, end = span(tensor)
        seen, known = self.clocks[stream], self.touched[storage]
        for other in list(known.values()):
            if other.stream == stream or not other.overlaps(begin, end):
                continue
            if (writing or other.writes) and seen[other.stream] < other.time:
                does = "writes" if writing else "reads"
                did = "writes" if other.writes else "reads"
                self._race(f"{name} on {stream} {does} what {other.name} on {other.stream} {did}")
        mine = Access(stream, seen[stream], writing, name, begin, end)
        known[stream, writing, begin, end] = mine
        if stream != COMPUTE:
            self.beside.append(mine)

    def fresh(self, tensor: Tensor) -> None:
        """Memory that the computes' allocator has given out: nobody may still work on it."""
        storage = tensor.untyped_storage()
        begin, end = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
        seen, host = self.clocks[COMPUTE], self.clocks[HOST]
        self.beside = [
            one for one in self.beside if max(seen[one.stream], host[one.stream]) < one.time
        ]
        for one in self.beside:
            if one.overlaps(begin, end):
                self._race(f"memory of {one.name} on {one.stream} is given out again")
        self.touched.pop(begin, None)

    def _race(self, words: str) -> None:
        ours = [one for one in traceback.extract_stack() if "/src/ptdmpi/" in one.filename]
        place = f"{ours[-1].filename.split('/src/ptdmpi/')[1]}:{ours[-1].lineno}" if ours else "?"
        self.races.append(f"{place}: {words}")


def span(tensor: Tensor) -> tuple[int, int, int]:
    """The storage of a tensor and the bytes [begin, end) that it reaches over, by address."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    elements = 1 + sum((length - 1) * stride for length, stride in sizes)
    begin = tensor.data_ptr()
    return tensor.untyped_storage().data_ptr(), begin, begin + elements * tensor.element_size()


class Watch(TorchDispatchMode):
    """Books every operation of this thread as a kernel of the compute stream."""

    def __init__(self, books: Books) -> None:
        super().__init__()
        self.books = books

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        result = func(*args, **named)
        if func.is_view:
            return result
        reads, writes = [], []
        arguments = func._schema.arguments
        given = [*zip(arguments, args, strict=False)]
        given += [(one, named[one.name]) for one in arguments if one.name in named]
        for argument, value in given:
            changed = argument.alias_info is not None and argument.alias_info.is_write
            (writes if changed else reads).extend(tensors_of(value))
        known = {one.untyped_storage().data_ptr() for one in (*reads, *writes)}
        for one in tensors_of(result):
            if one.untyped_storage().data_ptr() not in known:
                self.books.fresh(one)
            writes.append(one)
        self.books.launch(func.overloadpacket.__name__, COMPUTE, reads, writes)
        return result


def tensors_of(value: Any) -> list[Tensor]:
    """Return the tensors in nested arguments that are not empty."""
    return [one for one in tree_leaves(value) if isinstance(one, Tensor) and one.numel()]


class BookedMark(Marked):
    """A mark with the clock of its stream."""

    def __init__(self, library: "BookedStandIn", clock: Clock) -> None:
        super().__init__(library)
        self.clock = clock


def done(handle: Queued) -> bool:
    """Return `Queued.done`, and book what the host learns by it. Queries of the watch are not
    booked: no memory is freed after them, and a race could be hidden by chance."""
    over = handle._event.query()
    if over:
        handle._line.library.books.join(HOST, handle._event.clock)
    return over


class BookedHost(Host):
    """The stream of the computes, with its marks booked."""

    def record_event(self) -> BookedMark:
        """Return a mark after the computes so far."""
        mark = BookedMark(self.library, self.library.books.mark(COMPUTE))
        mark.reached.set()
        return mark

    def wait_event(self, event: BookedMark) -> None:
        """Wait for a mark, and book that the computes come after it."""
        super().wait_event(event)
        self.library.books.join(COMPUTE, event.clock)


class BookedQueue(Queue):
    """A stream with its marks booked."""

    @property
    def name(self) -> str:
        """Return the stream's name in the books."""
        return f"stream {self.number}"

    def record_event(self) -> BookedMark:
        """Return a mark after the work put in so far."""
        mark = BookedMark(self.library, self.library.books.mark(self.name))
        self.work.put(("mark", mark.reached.set))
        return mark

    def wait_event(self, event: BookedMark) -> None:
        """Let later work wait for a mark, and book that."""
        super().wait_event(event)
        self.library.books.join(self.name, event.clock)


class BookedConnected(Connected):
    """Says what each operation reads and writes."""

    def _book(self, name: str, stream: BookedQueue, reads: list, writes: list) -> None:
        self.library.books.launch(f"{name} on {self.name}", stream.name, reads, writes)

    def all_reduce(self, flat: Tensor, op: str, stream: BookedQueue) -> None:
        """Book the reads and writes of an all-reduce, and begin it."""
        self._book("all_reduce", stream, [flat], [flat])
        super().all_reduce(flat, op, stream)

    def all_gather(self, result: Tensor, flat: Tensor, stream: BookedQueue) -> None:
        """Book the reads and writes of an all-gather, and begin it."""
        self._book("all_gather", stream, [flat], [result])
        super().all_gather(result, flat, stream)

    def reduce_scatter(self, result: Tensor, flat: Tensor, stream: BookedQueue) -> None:
        """Book the reads and writes of a reduce-scatter, and begin it."""
        self._book("reduce_scatter", stream, [flat], [result])
        super().reduce_scatter(result, flat, stream)

    def broadcast(self, flat: Tensor, root: int, stream: BookedQueue) -> None:
        """Book the reads and writes of a broadcast, and begin it."""
        self._book("broadcast", stream, [flat], [flat])
        super().broadcast(flat, root, stream)

    def send(self, flat: Tensor, peer: int, stream: BookedQueue) -> None:
        """Book the reads and writes of a send, and begin it."""
        self._book("send", stream, [flat], [])
        super().send(flat, peer, stream)

    def receive(self, flat: Tensor, peer: int, stream: BookedQueue) -> None:
        """Book the reads and writes of a receive, and begin it."""
        self._book("receive", stream, [], [flat])
        super().receive(flat, peer, stream)


class BookedStandIn(StandIn):
    """A stand-in that books what is put into its streams."""

    def __init__(self, everyone: MPI.Comm) -> None:
        super().__init__(everyone)
        self.books = Books()
        self.host = BookedHost(self)

    def connect(self, unique_id: bytes, size: int, rank: int, name: str) -> BookedConnected:
        """Return a connection whose operations are booked."""
        made = super().connect(unique_id, size, rank, name)
        return BookedConnected(self, name, made.tag, made.members, made.rank)

    def stream(self) -> BookedQueue:
        """Return a new stream whose marks are booked."""
        self.streams.append(BookedQueue(self, len(self.streams)))
        return self.streams[-1]
