"""Lines on stdout and stderr, also if their disk is full."""

import io

import pytest

from ptdmpi.base.say import put


def test_a_line_for_a_full_disk_is_dropped():
    """Nothing of it is left in the stream, whose end would fail otherwise."""
    with open("/dev/full", "w") as stream:
        for _ in range(3):
            put("a line", stream)


def test_a_reader_that_has_ended_is_reported():
    class Closed(io.StringIO):
        def flush(self):
            raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        put("a line", Closed())
