"""No operation of the wire races with a compute, and the detector finds those that would."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

from ptdmpi.comm.nccl.wire import Line, Queued
from ptdmpi.engine.data_parallel.overlap import BegunSums
from ptdmpi.engine.runner import Runner
from tests._configs import layout
from tests._engines import steps_of
from tests.comm._races import COMPUTE, BookedStandIn, Books, Watch, done
from tests.comm._stand_in import StandInCommunicator
from tests.comm.test_nccl import LAYOUTS, STAND_IN, engine_on
from tests.parallel import parallel


def races_of(comm, changes: dict, steps: int = 2) -> tuple[list[str], int]:
    """What raced on any rank in the first steps of an engine, and how much was looked at here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StandInCommunicator, "load", lambda everyone, device: BookedStandIn(everyone))
        engine = engine_on(comm, changes, STAND_IN)
    books = StandInCommunicator.library.books
    with Watch(books), changed(Queued, "done", lambda usual: done):
        steps_of(engine, steps)
    StandInCommunicator.library = None
    return [one for found in comm.allgather(books.races) for one in found], books.kernels


@parallel(ranks=[4])
@pytest.mark.parametrize(
    "name", [pytest.param(one, marks=[] if one == "zb-v" else pytest.mark.long) for one in LAYOUTS]
)
def test_nothing_races_in_a_step(comm, name):
    races, kernels = races_of(comm, LAYOUTS[name])
    assert races == []
    assert kernels > 200


@contextmanager
def changed(owner: type, name: str, make: Callable) -> Iterator[None]:
    """`owner.name` replaced by what `make` makes of it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, make(getattr(owner, name)))
        yield


def nobody_waits():
    """The computes do not wait for a message: only the host does."""

    def wait(handle) -> None:
        handle._event.wait("a fault")
        handle._tensors = ()

    return changed(Queued, "wait", lambda usual: wait)


def begun_at_once():
    """A message does not wait for what has computed it."""

    def begin(line, what, work, *arguments):
        work(*arguments, line.stream)
        tensors = [one for one in arguments if isinstance(one, torch.Tensor)]
        return Queued(line, line.stream.record_event(), what, tensors)

    return changed(Line, "begin", lambda usual: begin)


def into_another_stream():
    """The mark stands in one stream, the work in another."""

    def begin(line, what, work, *arguments):
        line.stream.wait_event(line.library.computes_in().record_event())
        other = line.library.stream()
        other.wait_event(line.library.computes_in().record_event())
        work(*arguments, other)
        tensors = [one for one in arguments if isinstance(one, torch.Tensor)]
        return Queued(line, line.stream.record_event(), what, tensors)

    return changed(Line, "begin", lambda usual: begin)


def written_while_it_is_sent():
    """The buffer of a message is used for something else before its handle is done."""

    def make(usual):
        def isend(group, flat, peer):
            handle = usual(group, flat, peer)
            flat.mul_(1.0)
            return handle

        return isend

    return changed(StandInCommunicator, "_isend", make)


def read_before_it_is_there():
    """Who receives looks into the buffer before waiting."""

    def make(usual):
        def take(runner, source, watch):
            if source in runner._arriving:
                runner._arriving[source][1].sum()
            return usual(runner, source, watch)

        return take

    return changed(Runner, "_input", make)


def let_go():
    """Neither handle nor runner keeps a message that is under way."""

    def make(usual):
        def act(runner, schedule, action):
            usual(runner, schedule, action)
            for handle, _, _ in runner._leaving:
                handle.wait = None
            runner._leaving = []

        return act

    return changed(Runner, "_act", make)


FAULTS = {
    "nobody waits": (nobody_waits, "what receive on pair .* writes"),
    "begun at once": (begun_at_once, "send on pair .* reads what .* on compute writes"),
    "another stream": (into_another_stream, "on compute reads what receive on pair"),
    "buffer used again": (written_while_it_is_sent, "mul_ on compute writes what send on pair"),
    "read early": (read_before_it_is_there, "sum on compute reads what receive on pair"),
    "let go": (let_go, "memory of send on pair .* is given out again"),
}


@parallel(ranks=[2])
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_that_was_put_in_is_found(comm, name):
    fault, words = FAULTS[name]
    with fault():
        races, _ = races_of(comm, LAYOUTS["interleaved"], steps=1)
    print(*races[:3], sep="\n")
    assert any(re.search(words, one) for one in races), races[:5]


@parallel(ranks=[2])
def test_a_sum_of_gradients_begun_too_early_is_found(comm):
    """When its layer is entered, and not when it is left; else nothing races."""

    def make(usual):
        def begin(sums, numbers):
            usual(sums, numbers)
            sums.end()

        return begin

    layers = {**layout(), "model.layers": 4}
    assert races_of(comm, layers, steps=1)[0] == []
    with changed(BegunSums, "begin", make):
        races, _ = races_of(comm, layers, steps=1)
    assert any("writes what all_reduce on " in one for one in races), races[:5]


def test_a_tensor_with_gaps_is_found():
    books = Books()
    books.launch("send", "stream 0", reads=[torch.zeros(4, 6).t()])
    assert ["the tensor has gaps" in one for one in books.races] == [True]


def test_ranges_marks_and_what_the_host_knows():
    books, flat = Books(), torch.zeros(10)
    books.launch("add", COMPUTE, writes=[flat[:5]])
    books.launch("send", "side", reads=[flat[5:]])  # other bytes
    assert books.races == []
    books.launch("send", "side", reads=[flat[4:]])
    assert len(books.races) == 1
    books.join("side", books.mark(COMPUTE))
    books.launch("send", "side", reads=[flat])
    books.launch("look", COMPUTE, reads=[flat])  # two that read
    assert len(books.races) == 1
    books.launch("add", COMPUTE, writes=[flat])
    assert len(books.races) > 1
    known = len(books.races)
    books.join("host", books.mark("side"))
    books.launch("add", COMPUTE, writes=[flat])
    assert len(books.races) == known
