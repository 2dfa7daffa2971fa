"""Times are read when the device is done, and not before."""

import time
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from ptdmpi.comm.clock import HOST, DeviceClock, Total, clock_of
from ptdmpi.watch.stopwatch import Doing, Place, Stopwatch
from tests.comm._wires import LateClock
from tests.device import _pretend


def test_the_hosts_marks_are_done_at_once():
    first, second = HOST.mark(), HOST.mark()
    assert first.done() and second.at_s() >= first.at_s()
    total = Total()
    total.add(first, second)
    assert total.seconds == second.at_s() - first.at_s()


def test_a_thread_that_asks_belongs_to_the_clocks_device():
    """On the first GPU its questions would make a context beside that GPU's own rank."""
    clock, chosen = object.__new__(DeviceClock), []
    clock._device = torch.device("cuda", 2)
    module = SimpleNamespace(set_device=chosen.append)
    with mock.patch.object(torch, "get_device_module", lambda device: module):
        clock.asked_from_here()
    HOST.asked_from_here()
    assert chosen == [clock._device]


def test_a_total_has_what_is_done():
    clock, total = LateClock(), Total()
    total.add(clock.mark(), clock.mark())
    assert total.seconds == 0.0
    clock.settle()
    total.add(clock.mark(), clock.mark())
    assert total.seconds == 1.0
    clock.settle()
    assert total.seconds == 2.0


def test_spans_are_of_the_clock_that_was_handed_in():
    clock, place = LateClock(), Place()
    watch = Stopwatch(3, place, clock)
    with watch.span("step"):
        with watch.span("forward", "F0.0"):
            assert (place.doing.kind, place.doing.op) == ("forward", "F0.0")
        with watch.span("backward", "B0.0"):
            pass
    with pytest.raises(AssertionError, match="before the device"):
        assert watch.spans
    clock.settle()
    spans = [(span.rank, span.kind, span.op, span.start_s, span.end_s) for span in watch.spans]
    assert spans == [
        (3, "forward", "F0.0", 2.0, 3.0),
        (3, "backward", "B0.0", 4.0, 5.0),
        (3, "step", "", 1.0, 6.0),
    ]
    assert watch.compute_s == 2.0


def test_a_rank_is_where_its_device_is():
    """The host has long gone on; whoever asks from another thread does not make it wait."""
    clock, place = LateClock(), Place()
    watch = Stopwatch(0, place, clock)
    with watch.span("forward", "F0.0"):
        pass
    with watch.span("receive", "B1.0", 1):
        pass
    handed = place.now()
    assert (handed.kind, handed.op) == ("forward", "F0.0")
    assert handed.since_s <= place.doing.since_s
    clock.settled = 3  # the first is done, the second has begun
    assert place.now() == Doing("receive", "B1.0", 1, 3.0)
    assert clock.settles == 0
    clock.settle()
    with watch.span("optimizer"):
        assert place.now() == place.doing
    assert [one.doing.kind for one in place._under_way] == ["optimizer"]


def test_a_clock_of_events_tells_the_hosts_time():
    reason = _pretend.available()
    if reason:
        pytest.skip(reason)
    with _pretend.pretended() as device:
        before_s = time.perf_counter()
        clock = clock_of(device)
        first = clock.mark()
        time.sleep(0.01)
        second = clock.mark()
        assert not first.done() and not second.done()
        clock.settle()
        # on both clocks, but for what lies between the wait and the look at the host's
        assert before_s - 0.1 < first.at_s() < second.at_s() < time.perf_counter() + 0.1
        assert 0.01 < second.at_s() - first.at_s() < 5.0
        assert clock_of(torch.device("cpu")) is HOST
