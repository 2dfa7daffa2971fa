"""Spans of work from begin to end; an exception leaves no span, but its place."""

import pytest

from ptdmpi.comm.clock import HOST
from ptdmpi.watch.stopwatch import Place, Stopwatch


def test_a_span_for_what_ended_and_a_place_for_what_did_not():
    place = Place()
    watch = Stopwatch(3, place, HOST)
    with watch.span("receive", "F0.1", peer=2):
        assert place.doing[:3] == ("receive", "F0.1", 2)
        with watch.span("gather"):
            pass
    with pytest.raises(RuntimeError), watch.span("forward", "F1.1"):
        raise RuntimeError("no luck")
    # in the order in which they ended
    assert [(span.rank, span.kind, span.op) for span in watch.spans] == [
        (3, "gather", ""),
        (3, "receive", "F0.1"),
    ]
    inner, outer = watch.spans
    assert outer.start_s <= inner.start_s <= inner.end_s <= outer.end_s
    assert place.doing[:3] == ("forward", "F1.1", None)
