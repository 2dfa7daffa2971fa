"""Reading corpora: tasks and pieces are a pure function of the bytes."""

import bz2
import gzip
import json
import lzma
import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_prep import encode, sources
from data_prep.encode import EncodeOptions, read_pieces
from data_prep.sources import (
    find_sources,
    group_sources,
    read_tasks,
    split_document,
    split_sources,
)
from ptdmpi.config import InputError

OPTIONS = EncodeOptions("bytes", "text", "strict", 0.0)
TEXTS = st.text(st.sampled_from("ab \n\té日🙂"), max_size=400)


def blocks_of(data, size):
    return [data[start : start + size] for start in range(0, len(data), size)]


@settings(max_examples=200, deadline=None)
@given(TEXTS, st.integers(1, 50))
def test_pieces_join_to_the_document_and_do_not_depend_on_the_blocks(text, block):
    data = text.encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "PIECE_BYTES", 16)
        pieces = list(split_document(blocks_of(data, block)))
        assert pieces == list(split_document([data]))
    assert b"".join(piece for piece, _ in pieces) == data
    assert [last for _, last in pieces] == [False] * (len(pieces) - 1) + [True]
    for piece, _ in pieces:
        assert len(piece) <= 16
        piece.decode()  # whole characters


@pytest.mark.parametrize(
    ("text", "first"),
    [
        ("aaaaaaaa\nb\nc d\n\ne fghij", "aaaaaaaa\nb\n"),  # a single line end is preferred
        ("aaaaaaaaa\n\n\nbbbbbbbbbbb", "aaaaaaaaa\n\n\n"),  # else the last one
        ("aaaa\naaaaaaaaaaaaaaaaaa", "aaaa\naaaaaaaaaaa"),  # none in the second half
        ("aaaaaaaaaaaaaa日日日", "aaaaaaaaaaaaaa"),
    ],
)
def test_where_a_long_document_is_cut(monkeypatch, text, first):
    monkeypatch.setattr(sources, "PIECE_BYTES", 16)
    assert next(split_document([text.encode()]))[0].decode() == first


def pieces_of(source):
    tasks = list(read_tasks(0, [source], lambda size: None))
    assert [task.index for task in tasks] == list(range(len(tasks)))
    return tasks, [piece for task in tasks for piece in read_pieces(task, OPTIONS)]


@settings(max_examples=60, deadline=None)
@given(st.lists(TEXTS, min_size=1, max_size=20), st.integers(1, 60), st.booleans())
def test_lines_are_read_whole_whatever_the_block(tmp_path_factory, texts, block, last_end):
    path = tmp_path_factory.mktemp("lines") / "a.jsonl"
    lines = [json.dumps({"text": text}, ensure_ascii=False) for text in texts]
    path.write_text("\n".join(lines) + "\n" * last_end)
    (source,) = find_sources([path])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "TASK_BYTES", 100)
        expected = pieces_of(source)
        patch.setattr(sources, "_BLOCK_BYTES", block)
        assert pieces_of(source) == expected
    assert [piece.text for piece in expected[1]] == texts


@settings(max_examples=300, deadline=None)
@given(
    st.binary(max_size=300),
    st.sampled_from(["a.jsonl", "a.txt", "a.txt.gz", "a.jsonl.zst", "b.txt.bz2", "b.jsonl.xz"]),
)
def test_any_bytes_give_text_or_the_documented_error(tmp_path_factory, data, name):
    path = tmp_path_factory.mktemp("fuzz") / name
    path.write_bytes(data)
    try:
        pieces_of(find_sources([path])[0])
    except InputError as error:
        assert str(path) in str(error)


@st.composite
def json_lines(draw):
    """Lines with texts of all sorts, and such as are damaged, by hand and by a byte."""
    record = {"a": draw(TEXTS), "text": draw(st.text(max_size=60)), "b": {"text": draw(TEXTS)}}
    line = json.dumps(record, ensure_ascii=draw(st.booleans())).encode()
    other = [
        line,
        line.replace(b'"b"', b'"text"'),  # the last one counts, and is not a text
        b'{"text": "%b"}' % draw(st.binary(max_size=40)),
        b'{"text": "' + b"ab\\ud83d" * 9 + b'\\ude42"}',  # halves of characters
        b'{"text": "' + b'\\"' * 40,  # no end
        b'["text"]',
    ]
    chosen = draw(st.sampled_from(other)).replace(b"\n", b" ")
    at = draw(st.integers(0, len(chosen)))
    byte = draw(st.binary(max_size=1))
    return chosen[:at] + byte.replace(b"\n", b" ") + chosen[at + draw(st.integers(0, 1)) :]


@pytest.mark.long
@settings(max_examples=1000, deadline=None)
@given(json_lines(), st.sampled_from(["strict", "replace"]), st.booleans())
def test_a_long_line_is_read_like_any_other(line, errors, skip):
    """By parts or as a whole: the same pieces, bad lines and words about them."""
    chunk = sources.Chunk(os.devnull, sources.JSONL, line + b'\n{"text": "x"}', 0, 1, True, True)
    options = EncodeOptions("bytes", "text", errors, 0.0, skip)

    def read():
        bad = []
        try:
            return list(read_pieces(sources.Task(0, 0, (chunk,)), options, bad)), bad
        except InputError as error:
            return str(error)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "PIECE_BYTES", 16)
        whole = read()
        patch.setattr(encode, "_LONG_LINE_BYTES", 0)
        patch.setattr(encode, "_PART_BYTES", 13)
        assert read() == whole


@settings(max_examples=60, deadline=None)
@given(st.lists(TEXTS, min_size=1, max_size=20), st.integers(1, 90), st.integers(1, 60))
def test_slices_of_a_file_have_each_line_once(tmp_path_factory, texts, slice_bytes, block):
    path = tmp_path_factory.mktemp("slices") / "a.jsonl"
    path.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    slices = split_sources(find_sources([path]), slice_bytes)
    assert len(slices) == -(-path.stat().st_size // slice_bytes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "TASK_BYTES", 70)
        patch.setattr(sources, "_BLOCK_BYTES", block)
        pieces = [piece.text for part in slices for piece in pieces_of(part)[1]]
    assert pieces == texts


def test_an_error_in_a_slice_names_the_line_of_the_file(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n' * 50 + "broken\n" + '{"text": "x"}\n' * 9)
    slices = split_sources(find_sources([tmp_path / "a.jsonl"]), 100)
    bad = 700 // 100
    for number, part in enumerate(slices):
        if number != bad:
            pieces_of(part)
    with pytest.raises(InputError, match=r"a\.jsonl:51: not a JSON line"):
        pieces_of(slices[bad])


@pytest.mark.parametrize(("suffix", "library"), [("gz", gzip), ("bz2", bz2), ("xz", lzma)])
def test_compressed_streams(tmp_path, suffix, library):
    text = "some words\n" * 300_000
    half = len(text) // 2
    path = tmp_path / f"a.txt.{suffix}"
    content = library.compress(text[:half].encode()) + library.compress(text[half:].encode())
    path.write_bytes(content)
    largest = max(map(len, sources.read_blocks(find_sources([path])[0], lambda size: None)))
    assert largest <= sources._INFLATED_BYTES or suffix == "gz"
    assert "".join(piece.text for piece in pieces_of(find_sources([path])[0])[1]) == text
    path.write_bytes(content[:-5])
    with pytest.raises(InputError, match="cannot be read"):
        pieces_of(find_sources([path])[0])


def test_files_are_found_in_sorted_order(tmp_path):
    (tmp_path / "b").mkdir()
    for name in ("z.txt", "a.jsonl.gz", "b/c.txt.zst", "b/a.py", "m.md", "x.txt.lz4"):
        (tmp_path / name).touch()
    names = [source.name for source in find_sources([tmp_path], [".py"])]
    assert names == ["a.jsonl.gz", "z.txt", "b/a.py", "b/c.txt.zst"]
    given_twice = [tmp_path / "z.txt", tmp_path / "b"]
    assert [source.name for source in find_sources(given_twice)] == ["z.txt", "c.txt.zst"]


def test_groups_are_consecutive_files_of_enough_bytes(tmp_path):
    for number, size in enumerate((5, 5, 5, 20, 0, 1)):
        (tmp_path / f"{number}.txt").write_text("x" * size)
    groups = group_sources(find_sources([tmp_path]), 10)
    assert [[source.name[0] for source in group] for group in groups] == [
        ["0", "1"],
        ["2", "3"],
        ["4", "5"],
    ]
