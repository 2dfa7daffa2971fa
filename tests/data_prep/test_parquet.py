"""Parquet files: their rows are documents, whole or in slices; skipped without pyarrow."""

import sys

import numpy as np
import pytest

from data_prep import sources
from data_prep.cli import main
from data_prep.encode import EncodeOptions, read_pieces
from data_prep.sources import find_sources, read_tasks, split_sources
from ptdmpi.config import InputError
from ptdmpi.data.shards import Dataset, map_tokens

OPTIONS = EncodeOptions("bytes", "text", "strict", 0.0)
TEXTS = [f"row {n} ünï " * (n % 7) for n in range(600)]


@pytest.fixture
def pyarrow():
    return pytest.importorskip("pyarrow", reason="the extra `corpus` is missing")


def write(pyarrow, path, column="text", texts=TEXTS, **options):
    import pyarrow.parquet as parquet

    table = pyarrow.table({"id": list(range(len(texts))), column: texts})
    parquet.write_table(table, path, **options)
    return path


def texts_of(parts, options=OPTIONS):
    tasks = [task for part in parts for task in read_tasks(0, [part], lambda size: None)]
    return [piece.text for task in tasks for piece in read_pieces(task, options)]


@pytest.mark.long
@pytest.mark.parametrize("options", [{}, {"row_group_size": 50, "compression": "zstd"}])
@pytest.mark.parametrize("slice_bytes", [100, 3000, 1 << 20])
def test_rows_in_slices(tmp_path, monkeypatch, pyarrow, options, slice_bytes):
    path = write(pyarrow, tmp_path / "a.parquet", **options)
    monkeypatch.setattr(sources, "TASK_BYTES", 1000)
    parts = split_sources(find_sources([path]), slice_bytes)
    assert len(parts) == -(-path.stat().st_size // slice_bytes)
    assert texts_of(parts) == TEXTS


def test_tokenize_a_directory_with_parquet(tmp_path, monkeypatch, pyarrow):
    (tmp_path / "in").mkdir()
    write(pyarrow, tmp_path / "in/a.parquet", "content", row_group_size=64)
    monkeypatch.setattr(
        sys, "argv",
        ["ptdmpi-data", "tokenize", str(tmp_path / "in"), "--output", str(tmp_path / "o"),
         "--tokenizer", "bytes", "--text-field", "content", "--shard-tokens", "700", "--quiet"],
    )  # fmt: skip
    main()
    headers = Dataset(tmp_path / "o").headers
    tokens = np.concatenate([map_tokens(header) for header in headers])
    pieces = [
        part.astype(np.uint8).tobytes() for part in np.split(tokens, np.flatnonzero(tokens == 256))
    ]
    assert b"".join(pieces).decode("utf-8", "ignore").replace("\0", "") == "".join(TEXTS)
    assert len(headers) > 5


@pytest.mark.parametrize("kind", ["string", "large_string", "string_view", "dictionary"])
def test_the_types_that_texts_have(tmp_path, pyarrow, kind):
    texts = pyarrow.array(["one", "ünï", "one"])
    column = texts.dictionary_encode() if kind == "dictionary" else texts.cast(kind)
    path = write(pyarrow, tmp_path / "a.parquet", texts=column)
    assert texts_of(find_sources([path])) == ["one", "ünï", "one"]


def test_bad_files(tmp_path, pyarrow):
    good = write(pyarrow, tmp_path / "a.parquet").read_bytes()
    cases = {
        "no column 'text', but id, body": write(pyarrow, tmp_path / "b.parquet", "body"),
        "has type int64, not text": write(pyarrow, tmp_path / "c.parquet", texts=[1, 2]),
        "row 1: no text": write(pyarrow, tmp_path / "d.parquet", texts=["x", None]),
    }
    import pyarrow.parquet as parquet

    twice = pyarrow.table([pyarrow.array(["a"])] * 2, names=["text", "text"])
    parquet.write_table(twice, tmp_path / "f.parquet")
    cases["has 2 columns 'text', but text, text"] = tmp_path / "f.parquet"
    (tmp_path / "e.parquet").write_bytes(good[: len(good) // 2])
    cases["e.parquet: cannot be read"] = tmp_path / "e.parquet"
    for message, path in cases.items():
        with pytest.raises(InputError, match=message) as caught:
            texts_of(find_sources([path]))
        assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_no_utf8_in_a_row(tmp_path, pyarrow):
    binary = pyarrow.array([b"fine", b"ba\xffd"], pyarrow.binary())
    texts = pyarrow.Array.from_buffers(pyarrow.string(), 2, binary.buffers())
    path = write(pyarrow, tmp_path / "a.parquet", texts=texts)
    with pytest.raises(InputError, match=r"a\.parquet: row 1: byte 2 is not UTF-8"):
        texts_of(find_sources([path]))
    replacing = EncodeOptions("bytes", "text", "replace", 0.0)
    assert texts_of(find_sources([path]), replacing) == ["fine", "ba\ufffdd"]


def test_missing_pyarrow_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    with pytest.raises(InputError, match="needs pyarrow: pip install"):
        texts_of(find_sources([tmp_path / "a.parquet"]))
