"""Counts and sizes in words, down to one and to nothing; text that a terminal may print."""

import os

import pytest

from ptdmpi.base.words import (
    counted,
    file_size,
    mistake_in_path,
    printable,
    printable_line,
    short,
)


@pytest.mark.parametrize(
    ("number", "noun", "words"),
    [
        (0, "step", "0 steps"),
        (1, "rank", "1 rank"),
        (1024, "rank", "1,024 ranks"),
        (2, "batch", "2 batches"),
        (2, "entry", "2 entries"),
        (2, "day", "2 days"),
    ],
)
def test_what_is_counted_has_its_plural(number, noun, words):
    assert counted(number, noun) == words


def test_no_count_is_rounded_away():
    numbers = (0, 1, 999, 1700, 1_234_567, 174.6e9, 2.5e12)
    assert [*map(short, numbers)] == ["0", "1", "999", "1.7K", "1.2M", "174.6B", "2.5T"]


def test_no_file_is_rounded_away():
    sizes = (0, 1, 999, 1234, 99_999, 123_456, 1_234_567_890)
    words = ["0 bytes", "1 byte", "999 bytes", "1.2 kB", "100.0 kB", "0.1 MB", "1,234.6 MB"]
    assert [*map(file_size, sizes)] == words


def test_text_from_a_file_cannot_change_a_terminal():
    assert printable("größer\x1b[31m\n\u202e漢\udcff") == "größer\\x1b[31m\n\\u202e漢\\udcff"
    assert printable_line("a\nb\tc") == "a\\nb\\tc"


@pytest.mark.parametrize(
    "path", ["", "a b", "-x", "\u00fc/\u6f22", "a{x}[red]", "\u00a0", "\u200d"]
)
def test_legal_paths(path):
    assert mistake_in_path(path) == ""


@pytest.mark.parametrize("path", ["a\0b", "a\nb", "a\x1b[31mb", "\x07", "a\x7f", "\x9b31m"])
def test_paths_that_would_change_a_terminal(path):
    assert "control characters" in mistake_in_path(path)


def test_a_path_that_is_not_text():
    assert "not UTF-8" in mistake_in_path(os.fsdecode(b"a\xff\n"))
