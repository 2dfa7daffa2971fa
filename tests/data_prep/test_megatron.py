"""Megatron's indexed datasets, both ways, against a writer and a reader of the format in here."""

import itertools
import json
import os
import struct
import sys

import numpy as np
import pytest

from data_prep import megatron, megatron_corpus
from data_prep.cli import main
from data_prep.state import RunState
from ptdmpi.data.shard_writer import ShardWriter
from ptdmpi.data.shards import Dataset, map_tokens, verify

EOD = 99
CODES = {"u1": 1, "i2": 3, "i4": 4, "i8": 5, "u2": 8}


def write_megatron(prefix, documents, dtype="u2", order=None):
    """Write `documents` (lists of sequences), with the sequences in this `order` in the .bin."""
    sequences = [np.array(sequence, f"<{dtype}") for sequence in itertools.chain(*documents)]
    order = range(len(sequences)) if order is None else order
    pointers = [0] * len(sequences)
    data = b""
    for number in order:
        pointers[number] = len(data)
        data += sequences[number].tobytes()
    bounds = [0, *itertools.accumulate(len(document) for document in documents)]
    index = b"MMIDIDX\0\0" + struct.pack("<QB", 1, CODES[dtype])
    index += struct.pack("<QQ", len(sequences), len(bounds))
    index += struct.pack(f"<{len(sequences)}i", *(sequence.size for sequence in sequences))
    index += struct.pack(f"<{len(sequences)}q", *pointers)
    index += struct.pack(f"<{len(bounds)}q", *bounds)
    prefix.with_name(prefix.name + ".bin").write_bytes(data)
    prefix.with_name(prefix.name + ".idx").write_bytes(index)


def read_megatron(prefix):
    """Type and documents, each a list of sequences."""
    index = prefix.with_name(prefix.name + ".idx").read_bytes()
    data = prefix.with_name(prefix.name + ".bin").read_bytes()
    assert index[:17] == b"MMIDIDX\0\0" + struct.pack("<Q", 1)
    dtype = {1: "<u1", 4: "<i4", 8: "<u2"}[index[17]]
    count, bounds_count = struct.unpack_from("<QQ", index, 18)
    lengths = struct.unpack_from(f"<{count}i", index, 34)
    pointers = struct.unpack_from(f"<{count}q", index, 34 + 4 * count)
    bounds = struct.unpack_from(f"<{bounds_count}q", index, 34 + 12 * count)
    assert len(index) == 34 + 12 * count + 8 * bounds_count
    sequences = [
        np.frombuffer(data, dtype, length, pointer).tolist()
        for length, pointer in zip(lengths, pointers, strict=True)
    ]
    return dtype, [sequences[start:stop] for start, stop in itertools.pairwise(bounds)]


def run(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["ptdmpi-data", *map(str, arguments)])
    main()


def fail(monkeypatch, capsys, *arguments):
    capsys.readouterr()
    with pytest.raises(SystemExit) as caught:
        run(monkeypatch, *arguments)
    output = capsys.readouterr()
    assert caught.value.code == 2 and output.out == "" and output.err.count("\n") == 1
    return output.err


def import_to(monkeypatch, place, *prefixes, options=()):
    numbers = ("--vocab-size", 100, "--eod-id", EOD)
    run(monkeypatch, "import-megatron", *prefixes, "--output", place, "--quiet", *numbers, *options)


def shard_documents(directory):
    """All documents, with their eod; those cut by the end of a shard are whole again."""
    dataset = Dataset(directory)
    joined = []
    for number, header in enumerate(dataset.headers):
        assert verify(header.path) == []
        offsets = dataset.documents(number).tolist()
        for start, stop in itertools.pairwise(offsets):
            document = map_tokens(header)[start:stop].tolist()
            if joined and joined[-1][-1] != dataset.eod_id:
                joined[-1] += document
            else:
                joined.append(document)
    return joined


def random_documents(seed, count=300, longest=40):
    chance = np.random.default_rng(seed)
    documents = []
    for _ in range(count):
        lengths = chance.integers(0, longest, chance.integers(0, 4))
        documents.append([chance.integers(0, EOD, length).tolist() for length in lengths])
        if documents[-1] and chance.random() < 0.5:
            documents[-1][-1].append(EOD)
    return documents


def expected(documents):
    whole = [list(itertools.chain(*document)) for document in documents]
    return [doc if doc[-1] == EOD else [*doc, EOD] for doc in whole if doc]


@pytest.mark.parametrize("dtype", CODES)
@pytest.mark.parametrize(("window", "block"), [(1 << 18, 1 << 20), (5, 50), (1, 7)])
def test_import_whatever_the_blocks(tmp_path, monkeypatch, capsys, dtype, window, block):
    monkeypatch.setattr(megatron, "_WINDOW_SEQUENCES", window)
    monkeypatch.setattr(megatron, "BLOCK_TOKENS", block)
    documents = random_documents(1)
    write_megatron(tmp_path / "a.b", documents, dtype)
    import_to(monkeypatch, tmp_path / "o", tmp_path / "a.b", options=["--json"])
    assert shard_documents(tmp_path / "o") == expected(documents)
    table = json.loads(capsys.readouterr().out)
    whole = [list(itertools.chain(*document)) for document in documents]
    assert table["empty_documents"] == whole.count([]) > 0
    assert table["documents"] == len(expected(documents))
    assert table["eods_added"] == sum(doc[-1] != EOD for doc in whole if doc) > 0
    assert table["train_tokens"] == sum(map(len, expected(documents)))


def test_sequences_in_any_place_and_several_prefixes(tmp_path, monkeypatch):
    documents = random_documents(2)
    others = random_documents(3)
    count = sum(map(len, documents))
    write_megatron(
        tmp_path / "a", documents, order=np.random.default_rng(0).permutation(count).tolist()
    )
    write_megatron(tmp_path / "b", others, "i4")
    monkeypatch.setattr(megatron, "BLOCK_TOKENS", 64)
    import_to(monkeypatch, tmp_path / "o", tmp_path / "a.bin", tmp_path / "b")
    assert shard_documents(tmp_path / "o") == expected(documents) + expected(others)


@pytest.mark.long
def test_held_out_split_and_restart(tmp_path, monkeypatch):
    documents = random_documents(4)
    documents += documents[:150]  # copies go to the same side
    documents.append([[5] * 700])  # longer than a block and than a shard
    write_megatron(tmp_path / "a", documents)
    monkeypatch.setattr(megatron, "BLOCK_TOKENS", 256)

    def import_split(place):
        import_to(
            monkeypatch, place / "t", tmp_path / "a",
            options=["--valid-output", place / "v", "--valid-fraction", 0.3, "--shard-tokens", 300],
        )  # fmt: skip

    def content(place):
        return {path.name: path.read_bytes() for path in sorted(place.glob("*/*.h5"))}

    import_split(tmp_path / "whole")
    train, valid = (shard_documents(tmp_path / "whole" / side) for side in "tv")
    assert sorted(train + valid) == sorted(expected(documents))
    assert not {tuple(doc) for doc in train} & {tuple(doc) for doc in valid}
    assert 0.15 < len(valid) / len(train + valid) < 0.45
    save = RunState.save
    saves = []

    def save_and_stop(state, group, progress):
        save(state, group, progress)
        saves.append(progress)
        if len(saves) == 7:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(RunState, "save", save_and_stop)
        import_split(tmp_path / "stopped")
    import_split(tmp_path / "stopped")
    assert content(tmp_path / "stopped") == content(tmp_path / "whole")


def test_a_block_holds_no_more_than_it_may(tmp_path, monkeypatch):
    monkeypatch.setattr(megatron, "BLOCK_TOKENS", 64)
    write_megatron(tmp_path / "a", [*random_documents(5, 50), [[1] * 1000, [2] * 27]])
    blocks = list(megatron.MegatronIndex(tmp_path / "a").blocks())
    assert max(block.tokens.size for block in blocks) == 64
    assert [block.tokens.size for block in blocks[-17:]] == [64] * 16 + [3]


@pytest.mark.parametrize("vocab_size", [100, pytest.param(70_000, marks=pytest.mark.long)])
def test_export_and_back(tmp_path, monkeypatch, vocab_size):
    documents = [*expected(random_documents(6)), [3] * 500 + [EOD], [4, EOD]]
    write_megatron(tmp_path / "a", [[document] for document in documents])
    numbers = ("--vocab-size", vocab_size, "--eod-id", EOD, "--shard-tokens", 150, "--quiet")
    run(monkeypatch, "import-megatron", tmp_path / "a", "--output", tmp_path / "o", *numbers)
    shards = {path.name: path.read_bytes() for path in (tmp_path / "o").glob("*.h5")}
    assert len(shards) > 10
    monkeypatch.setattr(megatron, "BLOCK_TOKENS", 7)
    run(monkeypatch, "export-megatron", tmp_path / "o", "--output", tmp_path / "new" / "b")
    dtype, exported = read_megatron(tmp_path / "new" / "b")
    assert dtype == ("<u2" if vocab_size == 100 else "<i4")
    assert exported == [[document] for document in documents]
    assert sorted(os.listdir(tmp_path / "new")) == ["b.bin", "b.idx"]
    run(
        monkeypatch, "import-megatron", tmp_path / "new" / "b", "--output", tmp_path / "p", *numbers
    )
    assert {path.name: path.read_bytes() for path in (tmp_path / "p").glob("*.h5")} == shards
    if vocab_size == 100:
        for suffix in ("bin", "idx"):
            assert (tmp_path / f"a.{suffix}").read_bytes() == (
                tmp_path / "new" / f"b.{suffix}"
            ).read_bytes()


def change(path, position, data):
    content = bytearray(path.read_bytes())
    content[position : position + len(data)] = data
    path.write_bytes(content)


# three sequences of 5, 6, 7 tokens in two documents: lengths at byte 34, offsets 46, bounds 70
DAMAGES = {
    "does not begin with MMIDIDX": lambda idx, bin: idx.write_bytes(b"TNTIDX\0\0" * 9),
    "has version 2": lambda idx, bin: change(idx, 9, b"\2"),
    "floating-point numbers": lambda idx, bin: change(idx, 17, b"\7"),
    "unknown type 77": lambda idx, bin: change(idx, 17, b"\x4d"),
    "3 sequences need 94": lambda idx, bin: idx.write_bytes(idx.read_bytes()[:-1]),
    "sequences need": lambda idx, bin: change(idx, 18, b"\xff" * 8),
    "must run from 0 to 3": lambda idx, bin: change(idx, 70, b"\1"),
    "document 1 ends before its start": lambda idx, bin: change(idx, 78, b"\4"),
    "sequence 2 has -1 tokens": lambda idx, bin: change(idx, 42, b"\xff" * 4),
    "sequence 1 has 6 tokens of 2 bytes at byte 11": lambda idx, bin: change(idx, 54, b"\x0b"),
    "sequence 0 has 5 tokens of 2 bytes at byte -1": lambda idx, bin: change(idx, 46, b"\xff" * 8),
    "sequence 2 has 7 tokens of 2 bytes at byte 22 of a.bin, which has 30": (
        lambda idx, bin: bin.write_bytes(bin.read_bytes()[:30])
    ),
    "token 8 of the documents has id 500, outside the vocabulary of 100": (
        lambda idx, bin: change(bin, 16, struct.pack("<H", 500))
    ),
    "a.bin: no such file": lambda idx, bin: bin.unlink(),
    "a.idx: no such file": lambda idx, bin: idx.unlink(),
}


@pytest.mark.parametrize("message", DAMAGES)
def test_damaged_files(tmp_path, monkeypatch, capsys, message):
    write_megatron(tmp_path / "a", [[[1] * 5], [[2] * 6, [3] * 7]])
    DAMAGES[message](tmp_path / "a.idx", tmp_path / "a.bin")
    arguments = ("--output", tmp_path / "o", "--vocab-size", 100, "--eod-id", 0, "--quiet")
    assert message in fail(monkeypatch, capsys, "import-megatron", tmp_path / "a", *arguments)
    assert not (tmp_path / "o").exists()


def test_vocabularies_and_outputs_that_do_not_do(tmp_path, monkeypatch, capsys):
    write_megatron(tmp_path / "a", [[[1] * 5]])
    common = ("import-megatron", tmp_path / "a", "--output", tmp_path / "o", "--quiet")
    for options, message in {
        (): "give either --tokenizer",
        ("--vocab-size", 9): "belong together",
        ("--vocab-size", 9, "--eod-id", 9): "0 <= eod-id",
        ("--vocab-size", 9, "--eod-id", 8, "--tokenizer", "bytes"): "give either --tokenizer",
    }.items():
        assert message in fail(monkeypatch, capsys, *common, *options)
    run(monkeypatch, *common, "--tokenizer", "bytes")
    assert shard_documents(tmp_path / "o") == [[1] * 5 + [256]]
    run(monkeypatch, "export-megatron", tmp_path / "o", "--output", tmp_path / "b")
    again = fail(monkeypatch, capsys, "export-megatron", tmp_path / "o", "--output", tmp_path / "b")
    assert "b.bin: exists" in again
    for nameless in (".", "/", ".."):
        words = ("export-megatron", tmp_path / "o", "--output", nameless)
        assert f"{nameless}: is not a PREFIX" in fail(monkeypatch, capsys, *words)
        words = ("import-megatron", nameless, *common[2:], "--tokenizer", "bytes")
        assert f"{nameless}: is not a PREFIX" in fail(monkeypatch, capsys, *words)
    (tmp_path / "link.bin").symlink_to(tmp_path / "a.bin")
    (tmp_path / "link.idx").symlink_to(tmp_path / "a.idx")
    words = (*common[:2], tmp_path / "link", *common[2:], "--tokenizer", "bytes")
    assert "link: given twice" in fail(monkeypatch, capsys, *words)


def test_two_exports_to_one_prefix(tmp_path, monkeypatch, capsys):
    write_megatron(tmp_path / "a", [[[1] * 5]])
    run(monkeypatch, "import-megatron", tmp_path / "a", "--output", tmp_path / "o", "--quiet",
        "--tokenizer", "bytes")  # fmt: skip
    words = ("export-megatron", tmp_path / "o", "--output", tmp_path / "b")
    write_index = megatron._write_index
    seen = []

    def meanwhile(*arguments):
        seen.append(fail(monkeypatch, capsys, *words))
        return write_index(*arguments)

    monkeypatch.setattr(megatron, "_write_index", meanwhile)
    run(monkeypatch, *words)
    assert len(seen) == 1 and f"b: process {os.getpid()} on " in seen[0]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "a.bin", "a.idx", "b.bin", "b.idx", "o",
    ]  # fmt: skip
    (tmp_path / "c.lock").write_text("process 1, killed")  # keeps nobody out
    run(monkeypatch, *words[:3], tmp_path / "c")
    assert (tmp_path / "c.bin").read_bytes() == (tmp_path / "b.bin").read_bytes()
    assert not (tmp_path / "c.lock").exists()


def test_an_export_that_ends_between_its_files_leaves_none(tmp_path, monkeypatch, capsys):
    write_megatron(tmp_path / "a", [[[1] * 5]])
    run(monkeypatch, "import-megatron", tmp_path / "a", "--output", tmp_path / "o", "--quiet",
        "--tokenizer", "bytes")  # fmt: skip
    replace = os.replace

    def full(source, target):
        if str(target).endswith(".idx"):
            raise OSError(28, "No space left on device")
        replace(source, target)

    monkeypatch.setattr(os, "replace", full)
    words = ("export-megatron", tmp_path / "o", "--output", tmp_path / "b")
    assert "No space left" in fail(monkeypatch, capsys, *words)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.bin", "a.idx", "o"]


def test_ids_too_large_for_megatron(tmp_path, monkeypatch, capsys):
    (tmp_path / "o").mkdir()
    with ShardWriter(
        tmp_path / "o" / "a.h5", "x", "0" * 64, vocab_size=1 << 32, eod_id=0
    ) as writer:
        writer.write(np.array([1 << 31, 0]), np.array([2]))
    error = fail(monkeypatch, capsys, "export-megatron", tmp_path / "o", "--output", tmp_path / "b")
    assert "token id 2147483648" in error and os.listdir(tmp_path) == ["o"]


def test_the_corpus_is_read_as_it_stands(tmp_path):
    """Tokens of a file with uint16 go to the shards without a copy before the writer."""
    write_megatron(tmp_path / "a", [[[1, EOD]], [[2, EOD]]])
    given = megatron_corpus.given_vocabulary(100, EOD)
    corpus = megatron_corpus.MegatronCorpus([str(tmp_path / "a")], None, given, 0.0)
    (block,) = megatron.MegatronIndex(tmp_path / "a").blocks()
    assert np.shares_memory(corpus._encode(0, 0, block).tokens, block.tokens)
