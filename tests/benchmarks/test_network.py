"""Nodes in namespaces and the link between them: what the switch makes of a rate and a delay."""

import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import pytest

from benchmarks.marks import replaced
from benchmarks.network.case import PTD_P, ZERO_3, Compared
from benchmarks.network.nodes import NodeLink, Nodes, NoNodes
from benchmarks.network.page import draw_measured, measured_lines
from benchmarks.network.ptd_zero3 import check_sent, measure
from benchmarks.network.switch import HEADER, Port, Switch
from tests.parallel import ROOT

LINK = NodeLink(50.0, 3000.0)
LATENCY, LARGE = 8, 1 << 18  # bytes
TINY = Compared(layers=2, hidden=32, heads=2, seq_length=16, vocab_size=64, batches=(2,), rounds=1)


def frame(to: int, source: int, length: int) -> bytes:
    """A frame of `length` bytes behind an empty virtio header."""
    addresses = bytes([0, 0, 0, 0, 0, to]) + bytes([0, 0, 0, 0, 0, source])
    return bytes(HEADER) + addresses + bytes(length - 12)


@pytest.fixture
def switched():
    """A switch of 1 MB/s and 50 ms, and the cards 1, 2, 3 of its nodes, all known to it."""
    pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM) for _ in range(3)]
    for port, _ in pairs:
        port.setblocking(False)
    switch = Switch([Port(port) for port, _ in pairs], 1e6, 0.05)
    switch.behind = {bytes([0] * 5 + [n]): port for n, port in enumerate(switch.ports, 1)}
    yield switch, [card for _, card in pairs]
    for pair in pairs:
        for end in pair:
            end.close()


def test_frames_take_their_turn_on_the_card(switched):
    """10 kB at 1 MB/s: 10 ms each, one behind the other, and the delay once."""
    switch, cards = switched
    begin = time.monotonic()
    for _ in range(3):
        cards[0].send(frame(2, 1, 10_000))
    switch.take(switch.ports[0])
    arrives = [when for when, _ in switch.ports[1].queue]
    assert arrives[0] - begin >= 0.06
    assert [later - arrives[0] for later in arrives[1:]] == pytest.approx([0.01, 0.02])
    assert not switch.ports[2].queue


def test_two_senders_share_the_rate_of_the_receiver(switched):
    switch, cards = switched
    for sender in (2, 3):
        cards[sender - 1].send(frame(1, sender, 60_000))
        switch.take(switch.ports[sender - 1])
    first, second = (when for when, _ in switch.ports[0].queue)
    assert second - first == pytest.approx(0.06)


def test_a_frame_for_everybody_reaches_all_others_and_its_sender_is_known(switched):
    switch, cards = switched
    switch.behind.clear()
    cards[0].send(frame(3, 1, 100))  # where 3 is, is not known
    switch.take(switch.ports[0])
    assert [len(port.queue) for port in switch.ports] == [0, 1, 1]
    assert switch.behind == {bytes([0] * 5 + [1]): switch.ports[0]}


def test_a_frame_is_handed_over_whole_and_not_before_it_arrives(switched):
    switch, cards = switched
    cards[0].send(frame(2, 1, 1000))
    switch.take(switch.ports[0])
    arrives = switch.ports[1].queue[0][0]
    while (left_s := switch.deliver()) is not None:
        assert time.monotonic() + left_s <= arrives + 1e-3
        time.sleep(left_s)
    assert time.monotonic() >= arrives
    assert cards[1].recv(2000) == frame(2, 1, 1000)


def skip(error: NoNodes) -> None:
    pytest.skip(f"no nodes on this machine: {error}")


@pytest.mark.long
def test_two_ranks_find_the_link_that_was_asked_for_and_train_across_it():
    """Nothing is faster than the link; how much slower it may be leaves room for a busy machine."""
    try:
        found = measure(TINY, 2, LINK, {LATENCY: 5, LARGE: 2})
    except NoNodes as error:
        skip(error)
    latency_s, large_s = found["one_way_s"].values()
    delay_s, ideal_s = LINK.delay_us / 1e6, LINK.delay_us / 1e6 + LARGE * 8e-6 / LINK.rate_mbit
    assert delay_s <= latency_s < 5 * delay_s
    assert ideal_s <= large_s < 3 * ideal_s
    (row,) = found["rows"]
    sent = {way: row["ways"][way]["sent_bytes"] for way in row["ways"]}
    assert 0 < sent[PTD_P] < sent[ZERO_3]


def test_nodes_end_with_the_program_that_made_them():
    """Also when it is killed: nothing of theirs has a name that could stay behind."""
    try:
        with Nodes(1, NodeLink(0.0)):
            pass
    except NoNodes as error:
        skip(error)
    script = (
        "import time\n"
        "from benchmarks.network.nodes import NodeLink, Nodes\n"
        "with Nodes(2, NodeLink(1.0)) as nodes:\n"
        "    print(nodes.first_process, nodes.place, flush=True)\n"
        "    time.sleep(60)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as maker:
        first, place = maker.stdout.readline().split()
        assert "benchmarks.network.nodes" in Path(f"/proc/{first}/cmdline").read_text()
        os.kill(maker.pid, signal.SIGKILL)
    try:
        end = time.monotonic() + 10.0
        while Path(f"/proc/{first}").exists():
            assert time.monotonic() < end, "its first process goes on"
            time.sleep(0.02)
    finally:
        for file in Path(place).iterdir():
            file.unlink()
        Path(place).rmdir()


def test_the_page_gets_its_lines_between_the_marks():
    page = "a\n<!-- one -->\nold\n<!-- end of one -->\nb\n"
    once = replaced(page, "one", iter(["new"]))
    assert once == "a\n<!-- one -->\nnew\n<!-- end of one -->\nb\n"
    assert replaced(once, "one", iter(["new"])) == once
    with pytest.raises(ValueError, match="no place for two"):
        replaced(page, "two", iter([]))


def test_measured_lines_take_ratios_round_by_round(tmp_path):
    ways = {
        PTD_P: {"tokens_per_s": [100.0, 300.0, 200.0], "sent_bytes": 1e6},
        ZERO_3: {"tokens_per_s": [50.0, 100.0, 400.0], "sent_bytes": 4e6},
    }
    run = {"ranks": 2, "link": {"rate_mbit": 1000.0, "delay_us": 200.0}}
    run |= {"one_way_s": {"8": 2.5e-4, str(1 << 20): 0.01}, "rows": [{"batch": 4, "ways": ways}]}
    here = {"cores": 2, "cpu": "a processor"}
    results = {"case": asdict(TINY), "machine": here, "measured": "2026-01-02T", "runs": [run]}
    lines = list(measured_lines(results))
    link = "1000 Mbit/s, 200 us"
    assert f"| 2 | {link} | 4 | 200 (100 to 300) | 100 (50 to 400) | 2.00 (0.50 to 3.00) |" in lines
    assert f"| 2 | {link} | 250 us | 839 Mbit/s | 1.0 to 1.0 | 4.0 to 4.0 |" in lines
    draw_measured(results, tmp_path / "rates.png")
    assert (tmp_path / "rates.png").stat().st_size > 1000


def test_what_sends_too_little_is_not_zero_3():
    """Three times 4 bytes for each of the model's parameters, counted by hand: two layers of
    12 h h + 13 h, the table, the positions, the last norm."""
    parameters = 2 * (12 * 32 * 32 + 13 * 32) + (64 + 16) * 32 + 2 * 32
    assert TINY.zero_bytes == 12 * parameters
    rows = [{"batch": 2, "ways": {ZERO_3: {"sent_bytes": 10.0 * parameters}}}]
    check_sent(TINY, {"rows": rows})
    rows[0]["ways"][ZERO_3]["sent_bytes"] = 8.0 * parameters  # of plain data parallelism
    with pytest.raises(RuntimeError, match="of ZeRO-3, which sends"):
        check_sent(TINY, {"rows": rows})
