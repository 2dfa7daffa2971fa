"""Progress on a terminal and in a log."""

import io
import sys

import click

from ptdmpi.base.progress import SOON_S, progress
from ptdmpi.base.say import QUIET, note


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_log_gets_plain_lines(monkeypatch, capsys):
    clock = iter([0.0, 10.0, 31.0, 40.0, 62.0])
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    with progress("reading", 4e6, "B") as advance:
        for _ in range(4):
            advance(1e6)
    assert capsys.readouterr().err.splitlines() == [
        "reading: 2.0 MB of 4.0 MB (50%), 31 s, about 31 s left",
        "reading: 4.0 MB of 4.0 MB (100%), 62 s, about 0 s left",
    ]


def test_who_waits_hears_soon_and_then_less_often(monkeypatch, capsys):
    clock = iter([0.0, 1.0, 2.0, 3.0, 6.0, 13.0, 14.0])
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    with progress("searching", None, "layout", first_s=SOON_S) as advance:
        for _ in range(6):
            advance(1)
    told = capsys.readouterr().err.splitlines()
    assert told == [f"searching: {n} layouts, {s} s" for n, s in ((2, 2), (4, 6), (6, 14))]


def test_nobody_knows_the_total(monkeypatch, capsys):
    with progress("looking", None, "layout", first_s=0.0) as advance:
        advance(3)
    assert capsys.readouterr().err == "looking: 3 layouts, 0 s\n"


def test_a_terminal_gets_a_bar(monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    with progress("reading", 10, "file") as advance:
        advance(10)
    assert "reading" in sys.stderr.getvalue() and "\r" in sys.stderr.getvalue()


def test_quiet_and_other_ranks_are_silent(monkeypatch, capsys):
    def work():
        with progress("reading", 10, "file", first_s=0.0) as advance:
            advance(1)
        note("by the way")

    with click.Context(click.Command("x")) as context:
        context.meta[QUIET] = True
        work()
    monkeypatch.setenv("PMI_SIZE", "2")
    monkeypatch.setenv("PMI_RANK", "1")
    work()
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("PMI_RANK", "0")
    work()
    assert capsys.readouterr().err.splitlines() == [
        "reading: 1 of 10 files (10%), 0 s, about 0 s left",
        "by the way",
    ]
