"""Programs as devices execute them: from queues, in order, asynchronously to the host.

The host enqueues a whole program without waiting. Each rank has one queue for computes and other
queues for messages. A message takes place when it is at the head of the sender's queue and of the
receiver's queue (rendezvous, as in NCCL: no buffer, no tag).
"""

from collections import defaultdict, deque
from collections.abc import Sequence

from ptdmpi.plan.schedule.ops import Op
from ptdmpi.plan.schedule.orders import DeadlockError
from ptdmpi.plan.schedule.program import (
    Action,
    Compute,
    MismatchError,
    Program,
    Receive,
    Send,
    structure_of,
)


def check_queues(
    programs: Sequence[Program], *, per_pair: bool = True, pauses: bool = False
) -> None:
    """Execute the programs of all ranks on such devices and raise an error if they fail.

    A message begins when the computes before it in its program are done (its queue waits for their
    event); a compute begins when its inputs have arrived. `per_pair`: each rank has one queue for
    each rank that it sends to and one for each rank that it receives from; otherwise all its
    messages are in one queue. `pauses`: each compute waits for everything that was enqueued before
    it, as if the device were synchronised inside it (memory is freed, a kernel is loaded).

    Raises DeadlockError, which names the oldest unfinished action of each unfinished rank, and
    MismatchError if a send meets another receive than its own or an op is out of place.
    """
    devices = _Devices(programs, per_pair, pauses)
    while devices.advance():
        pass
    devices.check_all_done()


class _Devices:
    """The state of `check_queues`: the finished actions of each program, and the queues."""

    def __init__(self, programs: Sequence[Program], per_pair: bool, pauses: bool) -> None:
        self.programs, self.per_pair, self.pauses = programs, per_pair, pauses
        self.structure = structure_of(programs)
        self.done = [[False] * len(program) for program in programs]
        # (rank, queue) -> places in the program of the rank, oldest first
        self.queues: dict[tuple[int, object], deque[int]] = defaultdict(deque)
        # number of actions that are done from the beginning, without a gap
        self.complete = [0] * len(programs)
        self.computed: set[tuple[int, Op]] = set()
        self.arrived: set[tuple[int, Op]] = set()
        for rank, program in enumerate(programs):
            for place, action in enumerate(program):
                self.queues[rank, self._queue(rank, action)].append(place)

    def _queue(self, rank: int, action: Action) -> object:
        if isinstance(action, Compute):
            return "compute"
        if not self.per_pair:
            return "messages"
        return (rank, action.peer) if isinstance(action, Send) else (action.peer, rank)

    def advance(self) -> bool:
        """Execute the head of each queue if it can proceed; return False if none could."""
        moved = False
        for (rank, _), queue in list(self.queues.items()):
            while queue and self._takes_place(rank, queue[0]):
                moved = True
        return moved

    def _takes_place(self, rank: int, place: int) -> bool:
        action = self.programs[rank][place]
        if isinstance(action, Send):
            return self._message(rank, place, action)
        return isinstance(action, Compute) and self._compute(rank, place, action.op)

    def _compute(self, rank: int, place: int, op: Op) -> bool:
        here = {(rank, need) for need in self.structure.needs(op)}
        if here - self.computed - self.arrived or (self.pauses and self.complete[rank] < place):
            return False
        self.computed.add((rank, op))
        self._end(rank, place, Compute(op))
        return True

    def _message(self, rank: int, place: int, send: Send) -> bool:
        """Execute a send and its receive, at the head of the partner's queue, if they can proceed.

        Returns True if the message took place. Raises MismatchError if the receive belongs to
        another send, or if the op is not computed yet.
        """
        peer, receive = send.peer, Receive(send.op, rank)
        waiting = self.queues[peer, self._queue(peer, receive)]
        if not waiting or not self._reached(rank, place) or not self._reached(peer, waiting[0]):
            return False
        action = self.programs[peer][waiting[0]]
        if not isinstance(action, Receive) or action.peer != rank:
            return False
        if action != receive:
            raise MismatchError(f"rank {rank}: {send} meets the receive {action} of rank {peer}")
        if (rank, send.op) not in self.computed:
            raise MismatchError(f"rank {rank}: {send} runs before {send.op} is computed here")
        self.arrived.add((peer, send.op))
        self._end(peer, waiting[0], action)
        self._end(rank, place, send)
        return True

    def _reached(self, rank: int, place: int) -> bool:
        """Return True if the computes before `place` in the rank's program are done."""
        computes = self.queues[rank, "compute"]
        return not computes or computes[0] > place

    def _end(self, rank: int, place: int, action: Action) -> None:
        self.queues[rank, self._queue(rank, action)].popleft()
        done = self.done[rank]
        done[place] = True
        while self.complete[rank] < len(done) and done[self.complete[rank]]:
            self.complete[rank] += 1

    def check_all_done(self) -> None:
        """Raise DeadlockError unless every action of every rank is done."""
        stuck = [
            f"rank {rank} at {program[place]}"
            for rank, (program, place) in enumerate(zip(self.programs, self.complete, strict=True))
            if place < len(program)
        ]
        if stuck:
            raise DeadlockError(f"deadlock: {', '.join(stuck)}")
