"""Times are read when the device is done, and not before."""

import pytest

from ptdmpi.comm.clock import HOST, Total
from ptdmpi.watch.stopwatch import Place, Stopwatch
from tests.comm._wires import LateClock


def test_the_hosts_marks_are_done_at_once():
    first, second = HOST.mark(), HOST.mark()
    assert first.done() and second.at_s() >= first.at_s()
    total = Total()
    total.add(first, second)
    assert total.seconds == second.at_s() - first.at_s()


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
