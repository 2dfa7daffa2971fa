"""Groups of ranks that communicate through a library such as NCCL: the unique ids and connections
of a group, and the order of its operations.

Every connection has its own stream for its operations. An operation begins after all earlier
computations, because its stream waits for a mark in the computation stream. When a rank waits for
an operation, only its computation stream waits for the mark after the operation; the host
continues.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import ClassVar, NamedTuple

import torch
from mpi4py import MPI
from torch import Tensor

from ptdmpi.comm.communicator import Exchanged, Handle
from ptdmpi.comm.nccl.library import Connection, Described, Event, Library, Nccl
from ptdmpi.comm.routed import Pair, RoutedCommunicator
from ptdmpi.comm.traits import WireError
from ptdmpi.config import InputError, SharedInputError

Argument = Tensor | Exchanged | str | int  # the type of the arguments of the library's operations
ELSE = 'legal: comm.wire = "mpi", "torch"'


class Queued:
    """An operation in a connection's stream. The object keeps references to the operation's tensors
    until `wait` is called. Otherwise torch could reuse the memory of these tensors while the
    operation still needs it."""

    def __init__(self, line: "Line", event: Event, label: str, tensors: Sequence[Tensor]) -> None:
        self._line = line
        self._event = event
        self.label = label
        self._tensors: Sequence[Tensor] = tensors

    def wait(self) -> None:
        """Let the computation stream wait for the operation. Raises WireError if the connection has
        failed."""
        self._line.check(self.label)
        self._line.library.computes_in().wait_event(self._event)
        self._tensors = ()

    def done(self) -> bool:
        """Return True if the device has completed the operation."""
        return self._event.query()


class _Placed(NamedTuple):
    """An operation in a stream, with one mark before it and one mark after it. The device passes
    the mark `computed` when the computations before the operation are done, and the mark `ended`
    when the operation is done."""

    what: str
    computed: Event
    ended: Event


class Line:
    """One connection (communicator) of the library, and the stream of its operations."""

    def __init__(self, library: Library, connection: Connection, name: str) -> None:
        self.library = library
        self.connection = connection
        self.name = name
        self.stream = library.stream()
        self._placed: deque[_Placed] = deque()
        self._failed = ""

    def begin(self, what: str, work: Callable[..., None], *arguments: Argument) -> Handle:
        """Put the operation `work` into the connection's stream, so that it begins after all
        computations that this rank has issued so far."""
        tensors = [tensor for tensor in arguments if isinstance(tensor, Tensor)]
        label = f"{what} of {max(tensor.nbytes for tensor in tensors)} bytes on {self.name}"
        for tensor in tensors:
            # the library would also send the memory in gaps between the elements of a tensor
            if not tensor.is_contiguous():
                raise ValueError(f"{label}: a tensor with gaps")
        self.check(label)
        computed = self.library.computes_in().record_event()
        self.stream.wait_event(computed)
        work(*arguments, self.stream)
        ended = self.stream.record_event()
        while self._placed and self._placed[0].ended.query():
            self._placed.popleft()
        self._placed.append(_Placed(what, computed, ended))
        return Queued(self, ended, label, tensors)

    def pending(self) -> str:
        """Return the name of the operation that the stream executes. Return "" if no operation is
        in the stream, or the stream still waits for computations.

        Any thread may call this method.
        """
        # `list` copies the queue in one step of the interpreter, because another thread may change
        # the queue at the same time
        for what, computed, ended in list(self._placed):
            if not ended.query():
                # the host may issue an operation long before the device begins the operation; until
                # the mark `computed` is passed, the device is busy with earlier computations
                return what if computed.query() else ""
        return ""

    def failure(self) -> str:
        """Return the first error of the connection, or "". Later errors would say only that the
        connection was aborted."""
        self._failed = self._failed or self.connection.error()
        return self._failed

    def check(self, label: str) -> None:
        """Raise WireError, with `label` in its message, if the connection has failed."""
        if error := self.failure():
            raise WireError(f"{label}: {error}")


class NcclCarrier:
    """The connections (`Line`) of one group: one for the whole group, and one for each directed
    pair (sender, receiver) in `pairs` that contains this rank."""

    def __init__(
        self, library: Library, control: MPI.Comm, group: str, pairs: Sequence[Pair]
    ) -> None:
        self.library = library
        self.rank = control.Get_rank()
        whole, of_pair = agreed_ids(library, control, group, pairs)
        self.whole = self._line(whole, control.Get_size(), self.rank, group)
        # connect one pair after the other; all ranks use the same order of pairs
        self.pairs = {
            pair: self._line(of_pair[pair], 2, pair.index(self.rank), f"pair {pair[0]}->{pair[1]}")
            for pair in pairs
            if self.rank in pair
        }

    def _line(self, unique_id: bytes, size: int, rank: int, name: str) -> Line:
        try:
            connection = self.library.connect(unique_id, size, rank, name)
        # whatever exception the library raises, the rank cannot train with this library
        except Exception as error:
            raise InputError(f'comm.wire = "nccl": no connection of {name}: {error}') from error
        return Line(self.library, connection, name)

    def reaches(self, flat: Tensor) -> bool:
        """Return True if the library can send this tensor."""
        return self.library.reaches(flat)

    def all_reduce(self, flat: Tensor, op: str) -> Handle:
        """Begin an all-reduce on the group's connection."""
        return self.whole.begin("all_reduce", self.whole.connection.all_reduce, flat, op)

    def all_gather(self, result: Tensor, flat: Tensor) -> Handle:
        """Begin an all-gather on the group's connection."""
        return self.whole.begin("all_gather", self.whole.connection.all_gather, result, flat)

    def reduce_scatter(self, result: Tensor, flat: Tensor) -> Handle:
        """Begin a reduce-scatter on the group's connection."""
        work = self.whole.connection.reduce_scatter
        return self.whole.begin("reduce_scatter", work, result, flat)

    def all_to_all(self, result: Tensor, flat: Tensor, parts: Exchanged) -> Handle:
        """Begin an all-to-all on the group's connection."""
        work = self.whole.connection.all_to_all
        return self.whole.begin("all_to_all", work, result, flat, parts)

    def broadcast(self, flat: Tensor, root: int) -> Handle:
        """Begin a broadcast on the group's connection."""
        return self.whole.begin("broadcast", self.whole.connection.broadcast, flat, root)

    def isend(self, flat: Tensor, peer: int) -> Handle:
        """Begin to send `flat` to rank `peer`."""
        line, there = self._way((self.rank, peer), peer)
        return line.begin("send", line.connection.send, flat, there)

    def irecv(self, flat: Tensor, peer: int) -> Handle:
        """Begin to receive `flat` from rank `peer`."""
        line, there = self._way((peer, self.rank), peer)
        return line.begin("receive", line.connection.receive, flat, there)

    def _way(self, pair: Pair, peer: int) -> tuple[Line, int]:
        """Return (connection, rank of `peer` in this connection) for messages of a directed pair.
        The pair's own connection is used if the pair has one; otherwise the group's connection is
        used.
        """
        line = self.pairs.get(pair)
        return (self.whole, peer) if line is None else (line, pair.index(peer))

    def pending(self) -> str:
        """Return the name of the operation that the stream of the group's connection executes, or
        ""."""
        # The connections of pairs are not queried, because they carry pipeline messages. A rank
        # that waits for a pipeline message reports the op of the schedule that needs the message.
        return self.whole.pending()

    def failure(self) -> str:
        """Return the name of the first connection that has failed, and its error; "" if none has
        failed."""
        for line in (self.whole, *self.pairs.values()):
            if error := line.failure():
                return f"{line.name}: {error}"
        return ""

    def abort(self) -> None:
        """Abort every connection."""
        for line in (self.whole, *self.pairs.values()):
            line.connection.abort()


class NcclCommunicator(RoutedCommunicator):
    """A group whose tensors are sent by NCCL."""

    library: ClassVar[Library | None] = None

    @classmethod
    def load(cls, everyone: MPI.Comm, device: torch.device) -> Library:
        """Load the library for this rank's device, and return it."""
        return Nccl(device)

    @classmethod
    def open(cls, everyone: MPI.Comm, device: torch.device) -> str:
        """Load the library. Raise SharedInputError, on every rank, if a rank cannot load the
        library, if ranks have different versions of the library, or if two ranks use the same
        device. Return the version and the path of the library."""
        mine: tuple[Described | None, str]
        try:
            cls.library = cls.load(everyone, device)
            mine = cls.library.describe(), ""
        # send the error to all ranks, which would otherwise wait for ever
        except Exception as error:
            mine = None, str(error)
        every = everyone.allgather(mine)
        for rank, (_, wrong) in enumerate(every):
            if wrong:
                raise SharedInputError(f'comm.wire = "nccl": rank {rank}: {wrong}; {ELSE}')
        libraries = [library for library, _ in every if library is not None]
        if len(versions := sorted({library.version for library in libraries})) > 1:
            raise SharedInputError(f'comm.wire = "nccl": ranks have libnccl {", ".join(versions)}')
        devices = [library.device for library in libraries]
        for rank, library in enumerate(libraries):
            if devices.index(library.device) < rank and not library.shares_devices:
                raise SharedInputError(
                    f'comm.wire = "nccl": ranks {devices.index(library.device)} and {rank} are on '
                    f"the same GPU, {library.device}; {ELSE}, or a GPU for each rank"
                )
        return f"NCCL {libraries[0].version} ({libraries[0].path})"

    def _connect(self, pairs: Sequence[Pair]) -> NcclCarrier:
        assert self.library is not None, "opened by the world"
        return NcclCarrier(self.library, self.control, self.group, pairs)


def agreed_ids(
    library: Library, control: MPI.Comm, group: str, pairs: Sequence[Pair]
) -> tuple[bytes, dict[Pair, bytes]]:
    """Return the unique id of the group, which its rank 0 makes, and the unique id of each pair,
    which the sender of the pair makes. If a rank cannot make an id, all ranks raise InputError with
    the reason.
    """
    rank = control.Get_rank()
    # a rank that cannot make an id sends its error instead of the id, because the receivers would
    # otherwise wait for ever
    whole = control.bcast(_new_id(library) if rank == 0 else None, root=0)
    mine = {pair: _new_id(library) for pair in pairs if pair[0] == rank} if whole[0] else {}
    of_pair: dict[Pair, tuple[bytes, str]] = {}
    if pairs:
        for made in control.allgather(mine):
            of_pair |= made
    made_by = [(0, whole), *((pair[0], made_id) for pair, made_id in of_pair.items())]
    for maker, (unique_id, wrong) in made_by:
        if not unique_id:
            raise InputError(
                f'comm.wire = "nccl": rank {maker} of the {group} axis has no id for the others: '
                f"{wrong}"
            )
    return whole[0], {pair: unique_id for pair, (unique_id, _) in of_pair.items()}


def _new_id(library: Library) -> tuple[bytes, str]:
    """Return (new id, ""), or (empty bytes, reason) if the library cannot make one."""
    try:
        return library.unique_id(), ""
    except Exception as error:
        return b"", str(error) or type(error).__name__
