"""The program of each rank: the rank's ops (forwards and backwards of its stages on microbatches)
in the order of a schedule, with the rank's messages inserted between the ops."""

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass

from ptdmpi.plan.schedule.ops import Op
from ptdmpi.plan.schedule.orders import DeadlockError, Placement, Schedule
from ptdmpi.plan.schedule.simulate import Costs, execute


@dataclass(frozen=True, slots=True)
class Compute:
    """An action of a program: compute `op`."""

    op: Op

    def __str__(self) -> str:
        return str(self.op)


@dataclass(frozen=True, slots=True)
class Send:
    """An action of a program: send the output of `op` to pipeline rank `peer`."""

    op: Op
    peer: int

    def __str__(self) -> str:
        return f"{self.op}->{self.peer}"


@dataclass(frozen=True, slots=True)
class Receive:
    """An action of a program: receive the output of `op` from pipeline rank `peer`."""

    op: Op
    peer: int

    def __str__(self) -> str:
        return f"{self.op}<-{self.peer}"


Action = Compute | Send | Receive
Program = tuple[Action, ...]


class MismatchError(Exception):
    """A mistake in programs: a message or an op is missing, repeated, or in the wrong order."""


def programs(schedule: Schedule) -> tuple[Program, ...]:
    """Return one program for each pipeline rank. No message is sent for a tensor that stays on its
    rank.

    The end time of every op is computed by a simulation in which a forward takes the time 1, a
    backward takes the time 2, and a transfer takes no time. All ops of all ranks are sorted by
    their end times into one total order. Each message is inserted into this order at the end time
    of the op that produces it, after all ops that end at that time. Each rank executes its own
    actions in this total order. Ops have positive durations, so a message comes after the op that
    produces it and before the op that reads it.

    The programs cannot deadlock, even on a transport where every message blocks its sender and its
    receiver, and carries no tag. Consider the first unfinished action in the total order. Each rank
    that takes part in this action has finished all its earlier actions. So all these ranks have
    reached the action, and the action proceeds. Messages between two ranks match in order, because
    both ranks follow the same total order. This proof also holds for devices that execute queued
    actions in order (`tests/plan/schedule/_queues.py`). The proof also holds for collectives that
    are called inside an op or started at the end of an op. All replicas execute the same program,
    so such a collective has the position of its op in the total order. An output is sent as soon as
    it is computed, because no other Compute comes between the Compute of an op and the Send of its
    output. Raises DeadlockError if ops of the schedule wait for each other in a circle.
    """
    # any positive costs of ops give an order that cannot deadlock; these costs are similar to the
    # costs of real ops
    times = execute(schedule, Costs(forward_s=1.0, backward_s=2.0, transfer_s=0.0))
    # (end time of the op, 0 for a compute or 1 for a message, the op that is computed or whose
    # output is sent, the rank that computes or receives)
    events: list[tuple[float, int, Op, int]] = []
    for rank, order in enumerate(schedule.orders):
        for op in order:
            events.append((times[op].end_s, 0, op, rank))
            source = schedule.source(op)
            if source is not None and schedule.rank_of(source.stage) != rank:
                events.append((times[source].end_s, 1, source, rank))
    of_rank: list[list[Action]] = [[] for _ in range(schedule.pipeline)]
    for _, is_message, op, rank in sorted(events):
        if is_message:
            sender = schedule.rank_of(op.stage)
            of_rank[sender].append(Send(op, rank))
            of_rank[rank].append(Receive(op, sender))
        else:
            of_rank[rank].append(Compute(op))
    return tuple(tuple(actions) for actions in of_rank)


def post_early(program: Program) -> Program:
    """Return a copy of `program` in which each Receive comes before the Compute that preceded it.
    The order of the receives does not change.

    Use this function for transports such as MPI, which have nonblocking receives and match the
    messages of each pair (sender, receiver) separately. The receive is then posted one op earlier,
    and the message can arrive while this op is computed. Only nonblocking receives may be moved. A
    blocking receive could wait forever, because its message may depend on an op that this rank runs
    only after the receive. A receive in a device's queue would delay the messages after it.
    """
    early: list[Action] = []
    since_compute: list[Action] = []  # the last Compute action and the Send actions after it
    for action in program:
        if isinstance(action, Compute):
            early.extend(since_compute)
            since_compute = [action]
        elif isinstance(action, Receive):
            early.append(action)
        else:
            since_compute.append(action)
    return (*early, *since_compute)


def check(programs: Sequence[Program], *, nonblocking_receives: bool = False) -> None:
    """Execute the programs of all ranks on the strictest simulated transport, and raise an error if
    they fail.

    Every Send blocks until the receiver reaches the matching Receive, and every Receive blocks
    until the sender reaches the matching Send. Messages carry no tag: from one rank to another,
    messages match in the order in which they are sent. If `nonblocking_receives` is True, a Receive
    returns immediately, and the Compute that needs the message waits for it.

    If the programs deadlock, raises DeadlockError with the current action of each unfinished rank.
    Raises MismatchError in these cases: a Receive gets the message of another op; a Send runs
    before its op is computed; a received message is never used; a Compute runs before its inputs
    are computed or requested; an op is missing, is computed twice, or is on a different rank than
    other ops of its stage.
    """
    wire = _Rendezvous(programs, nonblocking_receives)
    wire.run()
    wire.check_nothing_left()


class _Rendezvous:
    """The state of a simulated execution of programs (see `check`): the position of each rank in
    its program, the posted receives, and the delivered messages."""

    def __init__(self, programs: Sequence[Program], nonblocking_receives: bool) -> None:
        self.programs = programs
        self.nonblocking_receives = nonblocking_receives
        self.structure = structure_of(programs)
        self.position = [0] * len(programs)
        self.computed: list[set[Op]] = [set() for _ in programs]
        self.arrived: list[set[Op]] = [set() for _ in programs]
        self.used: list[set[Op]] = [set() for _ in programs]
        # (sender, receiver) -> receives that are posted and have no message yet, oldest first
        self.posted: dict[tuple[int, int], deque[Op]] = defaultdict(deque)
        self.asked: list[set[Op]] = [set() for _ in programs]
        self.runnable = list(range(len(programs)))

    def run(self) -> None:
        """Execute all programs; raise DeadlockError if a rank cannot finish."""
        while self.runnable:
            rank = self.runnable.pop()
            while self.position[rank] < len(self.programs[rank]):
                if not self._step(rank, self.programs[rank][self.position[rank]]):
                    break
                self.position[rank] += 1
        stuck = [
            f"rank {rank} at {program[position]}"
            for rank, (program, position) in enumerate(
                zip(self.programs, self.position, strict=True)
            )
            if position < len(program)
        ]
        if stuck:
            raise DeadlockError(f"deadlock: {', '.join(stuck)}")

    def _step(self, rank: int, action: Action) -> bool:
        """Execute `action` of rank `rank`. Return False if the rank must wait for another rank
        first."""
        if isinstance(action, Compute):
            return self._compute(rank, action.op)
        if not 0 <= action.peer < len(self.programs) or action.peer == rank:
            raise MismatchError(f"rank {rank}: {action} names no other rank")
        if isinstance(action, Send):
            return self._send(rank, action)
        return self._receive(rank, action)

    def _compute(self, rank: int, op: Op) -> bool:
        for need in self.structure.needs(op):
            if need in self.computed[rank]:
                continue
            self.used[rank].add(need)
            if need in self.arrived[rank]:
                continue
            if need in self.asked[rank]:
                return False
            raise MismatchError(f"rank {rank}: {op} runs before its input {need} is here")
        self.computed[rank].add(op)
        return True

    def _send(self, rank: int, action: Send) -> bool:
        if action.op not in self.computed[rank]:
            raise MismatchError(f"rank {rank}: {action} runs before {action.op} is computed here")
        posted = self.posted[rank, action.peer]
        if not posted:
            return False
        expected = posted.popleft()
        if expected != action.op:
            raise MismatchError(
                f"rank {rank}: {action} meets the receive {expected}<-{rank} of rank {action.peer}"
            )
        self.arrived[action.peer].add(expected)
        self.runnable.append(action.peer)
        return True

    def _receive(self, rank: int, action: Receive) -> bool:
        if action.op in self.arrived[rank]:
            return True
        if action.op not in self.asked[rank]:
            self.asked[rank].add(action.op)
            self.posted[action.peer, rank].append(action.op)
            self.runnable.append(action.peer)
        return self.nonblocking_receives

    def check_nothing_left(self) -> None:
        """Raise MismatchError if a received message is unused, or if a receive got no message."""
        for rank, arrived in enumerate(self.arrived):
            if surplus := arrived - self.used[rank]:
                raise MismatchError(f"rank {rank}: receives {min(surplus)} and never uses it")
            if self.asked[rank] - arrived:
                raise MismatchError(f"rank {rank}: waits for a message that nobody sends")


def structure_of(programs: Sequence[Program]) -> Schedule:
    """Return the schedule that consists of the Compute actions of the programs. The programs must
    obey the dependencies of its ops.

    Raises MismatchError unless every op occurs exactly once and each stage is on one rank.
    """
    orders = tuple(tuple(a.op for a in program if isinstance(a, Compute)) for program in programs)
    home: dict[int, int] = {}
    seen: set[Op] = set()
    for rank, order in enumerate(orders):
        for op in order:
            if op in seen:
                raise MismatchError(f"rank {rank}: {op} is computed twice")
            if home.setdefault(op.stage, rank) != rank:
                raise MismatchError(f"rank {rank}: {op} is computed here, its stage elsewhere")
            seen.add(op)
    stages = 1 + max((op.stage for op in seen), default=-1)
    microbatches = 1 + max((op.microbatch for op in seen), default=-1)
    for kind in sorted({op.kind for op in seen}):
        for stage in range(stages):
            for microbatch in range(microbatches):
                if Op(kind, stage, microbatch) not in seen:
                    raise MismatchError(f"{Op(kind, stage, microbatch)} is missing on every rank")
    if stages % len(programs):
        raise MismatchError(f"{stages} stages on {len(programs)} ranks: some rank has fewer")
    placed = Placement(tuple(home[stage] for stage in range(stages)))
    return Schedule("", placed, microbatches, orders)
