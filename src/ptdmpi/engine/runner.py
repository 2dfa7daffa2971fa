"""The execution of a rank's program, which is a list of actions: ops, sends and receives. An op is
one computation of a stage, such as its forward or its backward on one microbatch.

The runner needs only the program and the pipeline stages of this rank. It need not know whether the
rank is the first or the last, or which phases the schedule has. The program contains every message
at a position where it cannot cause a deadlock.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ptdmpi.base.errors import InputError
from ptdmpi.comm.clock import Total
from ptdmpi.comm.communicator import Communicator, Handle
from ptdmpi.model.batch import MicrobatchPass
from ptdmpi.model.stage import Stage
from ptdmpi.plan.schedule.ops import Op
from ptdmpi.plan.schedule.orders import Schedule
from ptdmpi.plan.schedule.program import Action, Compute, Receive, Send
from ptdmpi.watch.stopwatch import Stopwatch


class Transfer(NamedTuple):
    """A message that is not completely sent or received: its handle, the tensor that is sent or
    filled, and the other rank."""

    handle: Handle
    buffer: Tensor
    peer: int


class OpHook:
    """An observer that is called before and after each op on this rank. The methods of this base
    class do nothing."""

    def begin(self, op: Op) -> None:
        """React to the beginning of `op`. The input of the op has arrived, and the op is computed
        next."""

    def end(self, op: Op, microbatch: MicrobatchPass) -> None:
        """React to the end of `op`. The time of this call is not part of the op's measured time.

        If `op` computes gradients of parameters, the gradients are already added to the buffer. If
        `op` is the forward of the last stage, `microbatch` already has its losses.
        """


class _Work(NamedTuple):
    """The arguments of one call of `Runner.run`: the schedule, its microbatches, and the stopwatch
    that records the time spans."""

    schedule: Schedule
    microbatches: Sequence[MicrobatchPass]
    watch: Stopwatch


class Runner:
    """The executor of the pipeline stages of one rank. It also sends activations, and gradients of
    activations, over the pipeline axis.

    The `hooks` are called before and after each op, in their order. `most_in_flight` is the maximum
    number of forward passes whose activations were stored at the same time in the last `run`,
    summed over the stages.
    """

    def __init__(
        self,
        stages: Mapping[int, Stage],
        axis: Communicator,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.stages = stages
        self.axis = axis
        self.dtype = dtype
        self.device = device
        self.boundary = next(iter(stages.values())).boundary
        self.hooks: list[OpHook] = []
        self.most_in_flight = 0
        # the groups of ranks in which ops call collectives: name -> communicator
        self.inside: dict[str, Communicator] = {"tensor": self.boundary.axis.comm}
        self._inside: dict[str, Total] = {}
        self._counted: list[tuple[Communicator, Total]] = []
        self._ready: dict[Op, Tensor] = {}
        self._arriving: dict[Op, Transfer] = {}
        self._leaving: list[Transfer] = []

    def run(
        self,
        schedule: Schedule,
        program: Sequence[Action],
        microbatches: Sequence[MicrobatchPass],
        watch: Stopwatch,
    ) -> None:
        """Execute `program`, this rank's part of `schedule`. An op names its microbatch by an index
        into `microbatches`. After the call, the microbatches contain their losses. `watch` records
        the time spans of the actions. If an action raises an exception, a note with the position in
        the program is added to the exception.
        """
        work = _Work(schedule, microbatches, watch)
        for stage in self.stages.values():
            stage.begin_step()
        self._inside = {group: Total() for group in self.inside}
        # do not measure groups of one rank, because they send nothing
        self._counted = [(c, self._inside[group]) for group, c in self.inside.items() if c.size > 1]
        self.most_in_flight = 0
        for place, action in enumerate(program):
            try:
                self._act(work, action)
            except SystemExit:  # a user's module ends the program; other ranks would wait
                raise InputError(f"code in op {action} ends the program") from None
            except Exception as error:
                error.add_note(_here(program, place))
                raise
        # wait until all messages are sent, because the next step overwrites the memory of the
        # tensors that they contain
        for handle, _, peer in self._leaving:
            with watch.span("send", "", peer):
                handle.wait()
        self._leaving = []

    def time_inside(self, name: str, group: Communicator) -> None:
        """From now on, measure the time that ops spend in collectives of `group`, and report it
        under the name `name`. Do nothing for a group of one rank, and for a group whose
        communicator is already timed under another name."""
        if group.size > 1 and all(group is not other for other in self.inside.values()):
            self.inside[name] = group

    @property
    def inside_s(self) -> dict[str, float]:
        """Return the seconds that the ops of the last program spent in collectives, by group of
        ranks. Call this method when the device has finished the program."""
        return {group: total.seconds for group, total in self._inside.items()}

    @contextlib.contextmanager
    def hooked(self, hook: OpHook) -> Iterator[None]:
        """Return a context in which `hook` is called before all other hooks. The hook is removed
        when the context ends, also after an exception."""
        self.hooks.insert(0, hook)
        try:
            yield
        finally:
            self.hooks.remove(hook)

    def under_way(self) -> list[Transfer]:
        """Return the messages that are not yet completely sent or received."""
        return [*self._arriving.values(), *self._leaving]

    def _act(self, work: _Work, action: Action) -> None:
        match action:
            case Receive(op, peer):
                # do not wait for the message here: the op that needs it waits, and other ops may
                # run before this op
                buffer = torch.empty(
                    self.boundary.wire_elements, dtype=self.dtype, device=self.device
                )
                self._arriving[op] = Transfer(self.axis.irecv(buffer, peer), buffer, peer)
            case Send(op, peer):
                message = self.boundary.pack(self._ready.pop(op))
                # keep the buffer alive until its message is sent
                self._leaving = [kept for kept in self._leaving if not kept.handle.done()]
                self._leaving.append(Transfer(self.axis.isend(message, peer), message, peer))
            case Compute(op):
                self._compute(work, op)

    def _input(self, source: Op | None, watch: Stopwatch) -> Tensor | None:
        """Return the output of the op `source`, which was computed on this rank or is received from
        another rank; None if `source` is None."""
        if source is None:
            return None
        if source in self._ready:
            return self._ready.pop(source)
        handle, buffer, peer = self._arriving.pop(source)
        with watch.span("receive", str(source), peer):
            handle.wait()
        # a message that is not scattered over the tensor ranks needs no gather, so record no span
        # for a gather
        if not self.boundary.scattered:
            return self.boundary.unpack(buffer)
        with watch.span("gather", str(source)):
            return self.boundary.unpack(buffer)

    def _compute(self, work: _Work, op: Op) -> None:
        compute: Callable[[MicrobatchPass, Tensor | None], Tensor | None] = getattr(
            self.stages[op.stage], op.row.method
        )
        given = self._input(work.schedule.source(op), work.watch)
        microbatch = work.microbatches[op.microbatch]
        for hook in self.hooks:
            hook.begin(op)
        for comm, waits in self._counted:
            comm.count(waits)
        try:
            with work.watch.span(op.row.span, str(op)):
                result = compute(microbatch, given)
        finally:
            for comm, _ in self._counted:
                comm.count(None)
        if result is not None:
            # store the output until the next op on this rank or a Send uses it
            self._ready[op] = result
        held = sum(stage.in_flight for stage in self.stages.values())
        self.most_in_flight = max(self.most_in_flight, held)
        for hook in self.hooks:
            hook.end(op, microbatch)


def _here(program: Sequence[Action], place: int) -> str:
    """Return a text with the actions near position `place` of the program, one per line, with a
    mark at `place`."""
    lines = [f"in op {program[place]} of this rank's schedule:"]
    for i in range(max(0, place - 3), min(len(program), place + 4)):
        lines.append(f"  {program[i]}{'   <-- here' if i == place else ''}")
    return "\n".join(lines)
