"""Duplicates: the expected documents are left out, for any workers and after restarts."""

import json
import random
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_prep.cli import main
from data_prep.duplicates import EXACT, Duplicates, repeated
from data_prep.state import RunState
from ptdmpi.config import InputError
from ptdmpi.data.shards import Dataset, map_tokens


def tokenize(monkeypatch, capsys, *arguments):
    monkeypatch.setattr(sys, "argv", ["ptdmpi-data", "tokenize", *map(str, arguments), "--json"])
    main()
    return json.loads(capsys.readouterr().out)


def documents(directory):
    tokens = np.concatenate([map_tokens(header) for header in Dataset(directory).headers])
    parts = np.split(tokens, np.flatnonzero(tokens == 256) + 1)[:-1]
    return [part[:-1].astype(np.uint8).tobytes().decode() for part in parts]


def prose(number, words=200):
    return " ".join(random.Random(number).choices("abcdefghijklmnopqrstuvwxyz", k=words))


@pytest.fixture
def corpus(tmp_path):
    """Two files; equal documents within and across them, one of them longer than a task."""
    folder = tmp_path / "in"
    folder.mkdir()
    long = "\n".join(prose(n, 40) for n in range(20_000))
    first = [prose(0), prose(1), prose(0), "", prose(2)]
    second = [prose(2) + "!", prose(1), "", prose(3), prose(3)]
    for name, texts in (("a", first), ("c", second)):
        lines = "\n".join(json.dumps({"text": text}) for text in texts)
        (folder / f"{name}.jsonl").write_text(lines)
    for name in "bd":
        (folder / f"{name}.txt").write_text(long)
    kept = [prose(0), prose(1), prose(2), long, prose(2) + "!", prose(3)]
    return folder, kept


def test_exact(tmp_path, monkeypatch, capsys, corpus):
    folder, kept = corpus
    common = (folder, "--tokenizer", "bytes", "--quiet", "--deduplicate", "exact")
    table = tokenize(monkeypatch, capsys, *common, "--output", tmp_path / "o", "--workers", 1)
    assert documents(tmp_path / "o") == kept
    assert (table["documents"], table["duplicates"], table["empty_documents"]) == (6, 4, 2)
    assert table["text_bytes"] == sum(len(text) for text in kept)
    plain = tokenize(
        monkeypatch, capsys, folder, "--tokenizer", "bytes", "--quiet", "--output", tmp_path / "all"
    )
    assert plain["documents"] == 10 and "duplicates" not in plain


@pytest.mark.long
def test_same_bytes_with_workers_groups_and_after_a_stop(tmp_path, monkeypatch, capsys, corpus):
    folder, kept = corpus
    common = (folder, "--tokenizer", "bytes", "--quiet", "--deduplicate", "exact",
              "--shard-tokens", 300_000)  # fmt: skip

    def content(place):
        return {path.name: path.read_bytes() for path in place.glob("*.h5")}

    tokenize(monkeypatch, capsys, *common, "--output", tmp_path / "one", "--workers", 1)
    tokenize(monkeypatch, capsys, *common, "--output", tmp_path / "two", "--workers", 2)
    assert "".join(documents(tmp_path / "one")) == "".join(kept)
    assert content(tmp_path / "one") == content(tmp_path / "two")
    save = RunState.save
    saves = []

    def save_and_stop(state, group, progress):
        save(state, group, progress)
        saves.append(progress)
        if len(saves) == 3:
            raise KeyboardInterrupt

    stopped = (*common, "--output", tmp_path / "stopped", "--workers", 1)
    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(RunState, "save", save_and_stop)
        tokenize(monkeypatch, capsys, *stopped)
    tokenize(monkeypatch, capsys, *stopped)
    assert content(tmp_path / "stopped") == content(tmp_path / "one")


def test_near(tmp_path, monkeypatch, capsys):
    pytest.importorskip("rensa", reason="the extra `corpus` is missing")
    base = prose(1, 1000)
    words = base.split()
    words[500] = "changed"
    texts = [base, prose(2, 1000), " ".join(words), base.upper(), prose(3, 4), prose(3, 4), "x"]
    (tmp_path / "x.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    table = tokenize(
        monkeypatch, capsys, tmp_path / "x.jsonl", "--tokenizer", "bytes", "--quiet",
        "--deduplicate", "near", "--output", tmp_path / "o",
    )  # fmt: skip
    assert documents(tmp_path / "o") == [texts[0], texts[1], texts[4], texts[6]]
    assert table["duplicates"] == 3


def test_missing_library_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "rensa", None)
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(SystemExit):
        tokenize(
            monkeypatch, capsys, tmp_path / "a.txt", "--tokenizer", "bytes",
            "--deduplicate", "near", "--output", tmp_path / "o",
        )  # fmt: skip
    assert "--deduplicate near needs rensa: pip install" in capsys.readouterr().err
    assert not (tmp_path / "o").exists()


@given(st.lists(st.tuples(*3 * (st.integers(0, 12),)), max_size=40))
def test_chains_of_shared_keys(rows):
    keys = np.array(rows, np.uint64).reshape(len(rows), 3)
    groups = list(range(len(rows)))
    for _ in rows:  # the slow way: every pair that shares a key, again and again
        for i in range(len(rows)):
            for j in range(i):
                if any(a == b for a, b in zip(rows[i], rows[j], strict=True)):
                    groups[i] = groups[j] = min(groups[i], groups[j])
    expected = [group != number for number, group in enumerate(groups)]
    assert repeated(lambda column: keys[:, column], 3, len(rows)).tolist() == expected


def test_damaged_files_between_the_two_readings(tmp_path):
    duplicates = Duplicates(tmp_path, EXACT)
    keys = np.array([[4], [5], [4], [6], [5]], np.uint64)
    duplicates._write("keys", 0, keys)
    duplicates._write("begun", 0, np.array([0, 3, 5]))
    duplicates.find(1)
    assert duplicates.of_task(0)(1).tolist() == [True, False, True]
    cut = b"\x93NUMPY\x01\x00\x76\x00{'descr': '<i8', 'shape': (("  # no end of its head
    for name, read in (
        ("keys", duplicates.find),
        ("begun", duplicates.of_task),
        ("dropped", duplicates.of_task),
    ):
        path = tmp_path / f"{name}-00000.npy"
        good = path.read_bytes()
        bad = [b"", b"text", cut + b" " * 90, good[:-1], bytes(len(good)), None]
        for content in [*bad, good.replace(b"<u8", b"<f8").replace(b"|b1", b"|u1")]:
            path.unlink(missing_ok=True)
            if content is not None:
                path.write_bytes(content)
            if content == good:  # "begun" has neither of the types
                continue
            with pytest.raises(InputError, match="--force to start again") as caught:
                read(0 if name != "keys" else 1)
            assert str(path) in str(caught.value)
        path.write_bytes(good)
    for begun in ([], [0, 3], [0, 6], [0, 4, 3, 5]):
        duplicates._write("begun", 0, np.array(begun, np.int64))
        with pytest.raises(InputError, match="does not fit 5 documents"):
            duplicates.of_task(0)
