"""What a rank sends, by hand."""

import pytest

from ptdmpi.base.traffic import Tally, Traffic


def test_bytes_by_the_convention():
    """A sum of 1000 bytes over four ranks sends 2 x 3/4 of them, a half of it 3/4."""
    tally = Tally(4)
    for kind in ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "send"):
        tally.add(kind, 1000)
    tally.add("send", 10, messages=3)
    tally.add("neighbours", 20, messages=2)
    assert tally.sent_bytes == {
        "all_reduce": 1500,
        "all_gather": 750,
        "reduce_scatter": 750,
        "broadcast": 1000,
        "send": 1030,
        "neighbours": 40,
        "all_to_all": 0,
    }
    assert tally.messages["send"] == 4 and tally.messages["all_reduce"] == 1
    with pytest.raises(KeyError):
        tally.add("gossip", 1)


def test_many_ranks_send_twice_the_bytes_of_a_sum():
    tally = Tally(1_000_000)
    tally.add("all_reduce", 10**9)
    assert tally.sent_bytes["all_reduce"] == 2 * 10**9 - 2000


def test_parts_of_bytes_add_up_before_they_are_left_out():
    tally = Tally(3)
    for _ in range(3):
        tally.add("all_gather", 4)
    assert tally.sent_bytes["all_gather"] == 8  # not 3 x 2


def test_since_and_what_there_is_none_of():
    tally = Tally(2)
    tally.add("all_reduce", 100)
    before = Traffic({"tensor": tally.copy(), "data": Tally(2)})
    tally.add("all_reduce", 60, messages=2)
    tally.add("send", 7)
    found = Traffic({"tensor": tally, "data": Tally(2)}).since(before)
    assert found.sent_bytes == {"tensor": {"all_reduce": 120, "send": 7}}
    assert found.messages == {"tensor": {"all_reduce": 2, "send": 1}}
    assert before.sent_bytes == {"tensor": {"all_reduce": 100}}
