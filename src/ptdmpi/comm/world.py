"""The world of all ranks: the numbering of the ranks, their division into the groups of the process
grid, and the end of all ranks after an error. No other module uses MPI's COMM_WORLD.

Import `ptdmpi.comm.launch` and call its `prepare` before importing this module. The import
initialises MPI, before torch starts its threads.
"""

import contextlib
import errno
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import TracebackType
from typing import TypeVar

import torch
from mpi4py import MPI

from ptdmpi.base.outside import LOOP, explained, mendable_paths
from ptdmpi.base.traffic import Traffic
from ptdmpi.base.words import printable
from ptdmpi.comm.clock import Clock
from ptdmpi.comm.communicator import Communicator
from ptdmpi.comm.launch import check_singleton
from ptdmpi.comm.mpi import MpiCommunicator
from ptdmpi.comm.traits import WireError
from ptdmpi.comm.wires import Wire, wire_named
from ptdmpi.config import InputError, SharedInputError
from ptdmpi.plan.layout.grid import WORLD, Coordinates, Grid

T = TypeVar("T")
# Error numbers of a failed write to stdout or stderr: a closed pipe, a full disk or quota, a broken
# disk.
OUTPUT_ERRORS = (errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EIO)


@dataclass(frozen=True)
class Axes:
    """The position of this rank in the process grid, and the communicators of this rank, such as
    `axes["tensor"]` and `axes["replicas"]`.

    `groups` has one communicator for each group of the grid that contains this rank, in the grid's
    order of groups. For example, a rank in the middle of a pipeline has no entry "ends", because
    this group consists of the first and the last pipeline rank.
    """

    grid: Grid
    coordinates: Coordinates
    groups: Mapping[str, Communicator]
    clock: Clock  # the clock that measures this rank's work.
    carried_by: str = ""  # a remark for the log about the transport

    def __getitem__(self, group: str) -> Communicator:
        """Return the communicator of a group that this rank belongs to; raises KeyError for all
        other groups."""
        return self.groups[group]

    @property
    def exact(self) -> bool:
        """Return True if the sums over every group are computed in ascending order of ranks (see
        `WireTraits.exact`)."""
        return all(group.exact for group in self.groups.values() if group.size > 1)

    @property
    def world(self) -> Communicator:
        """Return the communicator of all ranks of the grid."""
        return self.groups[WORLD]

    def settle(self) -> None:
        """Wait for this rank's device. Raises WireError if a connection has failed, because the
        tensors that the connection should have filled may then have any values."""
        self.clock.settle()
        if reason := self.failure():
            raise WireError(reason)

    def failure(self) -> str:
        """Return the error of the first transport that has failed, or "" if no transport has
        failed. Any thread may call this method."""
        return next(filter(None, (group.failure() for group in self.groups.values())), "")

    def abort(self) -> None:
        """End all operations that have begun on this rank's device, in all groups. Any thread may
        call this method."""
        _abort(self.groups.values())

    def traffic(self) -> Traffic:
        """Return a copy of this rank's tallies of sent bytes, by group. Groups of the same ranks
        share a communicator, and so have one tally. `Grid.called` determines the name of this tally
        in the result."""
        return Traffic({name: group.tally.copy() for name, group in self._tallied.items()})

    @cached_property
    def _tallied(self) -> Mapping[str, Communicator]:
        """Return this rank's communicators, by the names of their tallies. Finding the names takes
        about 2 ms, and each step reads the tallies twice, so the names are found only once."""
        own = [name for name in self.groups if self.grid.same_as(name) == name]
        return {self.grid.called(name): self.groups[name] for name in own}


@dataclass(frozen=True)
class Process:
    """The properties of a process that stay the same when ranks are lost and the other ranks are
    renumbered."""

    number: int  # the process's rank in the first world; logs and messages use this number.
    node: int  # the lowest rank on the process's node, in the launcher's numbering
    local_rank: int
    host: str


class World:
    """All ranks of the job. Ranks are numbered node by node, even if the launcher has started them
    in another order.

    A tensor group consists of t consecutive ranks, for tensor-parallel size t. If t divides the
    number of ranks on each node, each tensor group is therefore on one node.

    `made` contains every communicator that was split from this world, so that all of them can be
    revoked together. A new communicator is used only after a barrier on the communicator from which
    it was split. After this barrier, all ranks have the new communicator. If a rank fails later,
    every other rank can revoke the new communicator, which wakes the ranks that wait in it.
    """

    def __init__(
        self,
        everyone: MPI.Comm = MPI.COMM_WORLD,
        processes: Sequence[Process] | None = None,
        made: list[MPI.Comm] | None = None,
    ) -> None:
        """Number the ranks. If `processes` is given, the ranks of `everyone` are already numbered,
        and no message is sent."""
        check_singleton(MPI.COMM_WORLD.Get_size())
        self.made: list[MPI.Comm] = [] if made is None else made
        self.control = everyone
        self.processes = self._number_by_node() if processes is None else list(processes)
        self.rank: int = self.control.Get_rank()
        self.size: int = self.control.Get_size()
        self.process = self.processes[self.rank]
        self.local_rank = self.process.local_rank
        self.local_size = sum(process.node == self.process.node for process in self.processes)
        self.nodes: int = len({process.node for process in self.processes})
        self.host = self.process.host
        self.connected: list[Communicator] = []
        # a failing rank calls this function before it ends all ranks; the function may, for
        # example, print the progress of each rank
        self.last_words: Callable[[BaseException], None] = lambda error: None

    def device(self) -> torch.device:
        """Return this rank's device: a GPU of NVIDIA or AMD (CUDA or ROCm) if its node has one,
        otherwise the CPU. Other devices, such as Intel's GPUs, are not used. The GPU becomes
        torch's current device."""
        if not torch.cuda.is_available():
            return torch.device("cpu")
        device = torch.device("cuda", self.local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
        return device

    def _number_by_node(self) -> list[Process]:
        everyone = self.control
        node = self._make(everyone.Split_type(MPI.COMM_TYPE_SHARED))
        # The number of a node is the lowest of its ranks in the launcher's numbering. The ranks of
        # the world are sorted by the number of their node, then by the launcher's numbering.
        leader = node.bcast(everyone.Get_rank(), root=0)
        placed = everyone.allgather((leader, node.Get_rank(), socket.gethostname()))
        order = sorted(range(len(placed)), key=lambda rank: (placed[rank][0], rank))
        self.control = self._make(everyone.Split(0, key=order.index(everyone.Get_rank())))
        return [Process(number, *placed[rank]) for number, rank in enumerate(order)]

    def _make(self, *parts: MPI.Comm) -> MPI.Comm:
        """Record the communicators `parts`, which were just split from `control`, and wait for all
        ranks. Return the last of these communicators."""
        self.made += [part for part in parts if part != MPI.COMM_NULL]
        self.control.Barrier()
        return parts[-1]

    def part(self, ranks: Sequence[int]) -> "World | None":
        """Return a new world of the ranks `ranks`, in this order; None on other ranks. All ranks
        call this method."""
        inside = self.rank in ranks
        color, key = (0, ranks.index(self.rank)) if inside else (MPI.UNDEFINED, 0)
        control = self._make(self.control.Split(color, key))
        processes = [self.processes[rank] for rank in ranks]
        if not inside:
            return None
        part = World(control, processes, self.made)
        part.connected = self.connected
        return part

    def first(self, ranks: int) -> "World | None":
        """Return a new world of the ranks 0 .. `ranks` - 1; None on other ranks. All ranks call
        this method."""
        return self.part(range(ranks))

    def split(self, grid: Grid, wire: Wire | None = None) -> Axes:
        """Return the communicators of the grid's groups. Every rank of the world must call this
        method.

        `wire` is the transport that carries the messages of every group except the world. The
        world sends only small messages from host memory, which always go through MPI. By default
        `wire` is the transport that "auto" chooses. Raises InputError if the grid and the world
        have different numbers of ranks.
        """
        if grid.size != self.size:
            raise InputError(f"a grid of {grid.size} ranks on a world of {self.size}")
        wire = wire or wire_named()
        # MPI libraries support a limited number of communicators, so a group that has the same
        # ranks as an axis uses the communicator of that axis
        own = [group for group in grid.groups if group != WORLD and grid.same_as(group) == group]
        made: dict[str, MPI.Comm] = {}
        for group in own:
            members = grid.members(self.rank, group)
            # MPI requires all ranks to call Split, even ranks that belong to no group of this name.
            # The color of a group is its lowest rank, so all members of a group pass the same
            # color, and other ranks pass other colors.
            color = members[0] if members else MPI.UNDEFINED
            made[group] = self.control.Split(color, key=self.rank)
        self._make(*made.values())
        # Connect all groups here, one after the other. If each group were connected at its first
        # use, the messages that set up the connection could cause a deadlock.
        carried_by = wire.open(self.control)
        connected: dict[str, Communicator] = {WORLD: MpiCommunicator(self.control, group=WORLD)}
        for group, control in made.items():
            if control != MPI.COMM_NULL:
                connected[group] = wire.connect(control, grid.called(group))
                self.connected.append(connected[group])
                connected[group].made = self.made
        groups = {
            group: connected[grid.same_as(group)]
            for group in grid.groups
            if grid.same_as(group) in connected
        }
        return Axes(
            grid=grid,
            coordinates=grid.coordinates(self.rank),
            groups=groups,
            clock=wire.clock,
            carried_by=carried_by,
        )

    def tensor_axis_crosses_nodes(self, grid: Grid) -> bool:
        """Return True on every rank if some tensor group has ranks on more than one node."""
        return any(
            len({self.processes[peer].node for peer in grid.members(rank, "tensor")}) > 1
            for rank in range(self.size)
        )

    def abort_wires(self) -> None:
        """End all operations on this rank's device after a rank has failed. Otherwise a thread that
        waits for the device could wait for a message that never comes. After this call, messages
        can be sent only through MPI, until a new `World` opens the connections again. Any thread
        may call this method."""
        _abort(self.connected)

    def on_root(self, work: Callable[[], T]) -> T:
        """Run `work()` on rank 0 and return its result on every rank. If `work` raises InputError,
        or fails because a path is missing or unreadable, every rank raises InputError."""
        result: tuple[bool, T | str] = (True, "")
        if self.rank == 0:
            try:
                with mendable_paths():
                    result = (True, work())
            except InputError as error:
                result = (False, str(error))
        fine, value = self.control.bcast(result, root=0)
        if not fine:
            raise SharedInputError(value)
        return value


def _abort(communicators: Iterable[Communicator]) -> None:
    for communicator in communicators:
        # if the abort of one communicator fails, still abort the others
        with contextlib.suppress(Exception):
            communicator.abort()


def end_together(world: World) -> None:
    """Set up this rank so that an exception that is not caught ends all ranks, as `fail_together`
    does.
    """
    usual = sys.excepthook
    stderr = sys.stderr

    def end(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Print the exception and end all ranks. If the world has only one rank, Python handles
        every exception except InputError as usual."""
        if world.size == 1 and not isinstance(error, InputError):
            usual(kind, error, trace)
            return
        # If torch.distributed has been started, its excepthook redirects `sys.stderr` to a buffer,
        # calls this function, and would print the buffer only after the abort. So print to the
        # original stderr.
        with contextlib.redirect_stderr(stderr), fail_together(world):
            raise error

    sys.excepthook = end


@contextlib.contextmanager
def fail_together(world: World) -> Iterator[None]:
    """Return a context that ends all ranks if one rank fails. The ranks end within seconds, with a
    non-zero exit code, and the output names the rank that has failed.

    If all ranks have found the same input error (SharedInputError), they exit with code 2. In a job
    of several ranks, MPI_Abort is called after all other errors. Its code is 130 after Ctrl-C, and
    2 after an error that the user can correct: an input error that only this rank has found, or an
    error such as a missing file. After all other errors the code is 1. In a job of one rank,
    Ctrl-C, input errors and errors of files end the rank without MPI_Abort.
    """
    try:
        yield
    except (SystemExit, GeneratorExit):
        raise
    except SharedInputError as error:
        if world.rank == 0:
            print(printable(f"ptdmpi: error: {error}"), file=sys.stderr, flush=True)
        raise SystemExit(2) from None
    except InputError as error:
        # Several ranks may fail in the same way, because they read the same file. Each rank waits
        # longer than the ranks below it, so the lowest failed rank prints its error, and ends all
        # other ranks before they print theirs.
        time.sleep(min(6.0, 2.0 * world.rank))
        print(printable(f"ptdmpi: error: {error}"), file=sys.stderr, flush=True)
        # a single rank exits without MPI_Abort, which would print additional lines
        if MPI.COMM_WORLD.Get_size() == 1:
            raise SystemExit(2) from None
        time.sleep(0.2)  # give the launcher time to forward the line before the abort
        world.control.Abort(2)
    except KeyboardInterrupt:
        if world.size == 1:
            raise  # the caller ends the program, and MPI is finalized as usual
        print(f"ptdmpi: interrupted (rank {world.rank})", file=sys.stderr, flush=True)
        world.control.Abort(130)
    except BaseException as error:
        if world.size == 1 and isinstance(error, OSError) and _is_of_output(error):
            raise  # the caller ends the program with one line, and MPI is finalized as usual
        line, code = _of_a_file(error)
        if line and MPI.COMM_WORLD.Get_size() == 1:
            print(printable(f"ptdmpi: error: {line}"), file=sys.stderr, flush=True)
            raise SystemExit(code) from None
        text = line or "".join(traceback.format_exception(error))
        lines = [f"[rank {world.rank} on {world.host}] {line}" for line in text.splitlines()]
        print("\n".join(lines), file=sys.stderr, flush=True)
        world.last_words(error)
        world.abort_wires()
        world.control.Abort(code)


def _of_a_file(error: BaseException) -> tuple[str, int]:
    """Return a line about `error` and an exit code, if a disk or a path has caused the error;
    otherwise return ("", 1). Python stores a file name and an error number in such an error."""
    is_of_a_file = isinstance(error, OSError) and error.filename and error.errno is not None
    if is_of_a_file or str(error).startswith(LOOP):
        return explained(error) or ("", 1)
    return "", 1


def _is_of_output(error: OSError) -> bool:
    """Return True if `error` comes from a write to stdout or stderr: the program that reads the
    output has ended, or the disk is full or broken. An error of any other file contains the name of
    the file."""
    return error.filename is None and error.errno in OUTPUT_ERRORS
