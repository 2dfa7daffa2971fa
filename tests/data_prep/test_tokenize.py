"""`ptdmpi-data tokenize` from end to end: right tokens, and the same bytes whoever did the work."""

import gzip
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import zstandard

from data_prep.cli import main
from data_prep.encode import document_share
from data_prep.sources import split_document
from data_prep.state import RunState
from data_prep.vocabulary import load_tokenizer, train_bpe
from ptdmpi.data.shards import Dataset, map_tokens, verify
from tests.parallel import mpirun

PROGRAM = ["-m", "data_prep.cli"]
COMMAND = [sys.executable, *PROGRAM]


def run(*arguments, check=True, **options):
    """The command in a process of its own."""
    done = subprocess.run(
        [*COMMAND, *map(str, arguments)], capture_output=True, text=True, timeout=120, **options
    )
    assert not check or done.returncode == 0, done.stderr
    return done


def tokenize(monkeypatch, *arguments):
    """The command in this process."""
    monkeypatch.setattr(sys, "argv", ["ptdmpi-data", "tokenize", *map(str, arguments)])
    main()


def files(directory):
    return {path.name: path.read_bytes() for path in sorted(Path(directory).iterdir())}


def all_documents(directory):
    """Token ids of every document, in order, without eod; those cut by the end of a shard are whole
    again."""
    dataset = Dataset(directory)
    parts = []
    for number, header in enumerate(dataset.headers):
        assert verify(header.path) == []
        tokens = map_tokens(header)
        offsets = dataset.documents(number)
        ends = np.flatnonzero(tokens == dataset.eod_id) + 1
        assert offsets[1:].tolist() == sorted({*ends.tolist(), tokens.size})
        parts.append(tokens)
    tokens = np.concatenate(parts)
    ends = np.flatnonzero(tokens == dataset.eod_id)
    assert ends[-1] == tokens.size - 1
    starts = np.concatenate([[0], ends[:-1] + 1])
    return [tokens[start:end] for start, end in zip(starts, ends, strict=True)]


def make_texts(count, seed=0):
    words = [
        "shard",
        "token",
        "Müller",
        "  ",
        "\n",
        "x = 1",
        "日本語",
        "and",
        "the",
        "\n\n    return",
        "🙂",
    ]
    chance = random.Random(seed)
    return ["".join(chance.choices(words, k=chance.randint(1, 400))) for _ in range(count)]


@pytest.fixture(scope="module")
def bpe(tmp_path_factory):
    path = tmp_path_factory.mktemp("bpe") / "tok.json"
    path.write_text(train_bpe(make_texts(50), 300)[0])
    return path


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Files of every kind, empty documents among them: some 2 MB."""
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "deep").mkdir()
    texts = make_texts(1200)
    lines = [json.dumps({"text": text, "id": number}) for number, text in enumerate(texts)]
    lines.insert(3, json.dumps({"text": ""}))
    lines.insert(5, "")
    (folder / "deep" / "many.jsonl").write_text("\n".join(lines[:500]))
    (folder / "a.jsonl.gz").write_bytes(gzip.compress("\n".join(lines[500:850]).encode()))
    (folder / "b.jsonl.zst").write_bytes(zstandard.compress("\n".join(lines[850:]).encode()))
    (folder / "c.txt").write_text("".join(texts))  # longer than one piece
    (folder / "d.txt.gz").write_bytes(gzip.compress(b"one ") + gzip.compress(b"two"))
    (folder / "e.txt").write_text("")
    (folder / "f.py").write_text("import os\n")
    (folder / "notes.md").write_text("not taken")
    return folder


OPTIONS = ("--valid-fraction", "0.1", "--shard-tokens", "100000", "--quiet")


@pytest.fixture(scope="module")
def reference(corpus, bpe, tmp_path_factory):
    """One worker's output."""
    place = tmp_path_factory.mktemp("reference")
    run(
        "tokenize",
        corpus,
        "--output",
        place / "t",
        "--valid-output",
        place / "v",
        "--tokenizer",
        bpe,
        "--workers",
        1,
        *OPTIONS,
    )
    return place


def test_round_trip_of_bytes_and_bpe(tmp_path, monkeypatch, bpe, capsys):
    texts = [text for text in make_texts(40, seed=1) if text]
    lines = [json.dumps({"body": text}) for text in texts]
    (tmp_path / "x.jsonl").write_text("\n".join([*lines, json.dumps({"body": ""})]))
    for name in ("bytes", bpe):
        output = tmp_path / f"out-{Path(name).stem}"
        tokenize(
            monkeypatch,
            tmp_path / "x.jsonl",
            "--output",
            output,
            "--tokenizer",
            name,
            "--text-field",
            "body",
            "--json",
        )
        table = json.loads(capsys.readouterr().out)
        tokenizer = load_tokenizer(name)
        documents = all_documents(output)
        assert [tokenizer.decode(ids) for ids in documents] == texts
        assert table["documents"] == len(texts) and table["empty_documents"] == 1
        assert table["train_tokens"] == sum(ids.size + 1 for ids in documents)
        assert table["text_bytes"] == sum(len(text.encode()) for text in texts)
        assert Dataset(output).tokenizer_sha256 == tokenizer.sha256
    assert (Dataset(tmp_path / "out-bytes").vocab_size, Dataset(tmp_path / "out-bytes").eod_id) == (
        257,
        256,
    )


def test_all_kinds_of_files_in_order(corpus, tmp_path, monkeypatch):
    tokenize(
        monkeypatch, corpus, "--output", tmp_path / "o", "--tokenizer", "bytes", "--suffix", ".py"
    )
    documents = [bytes(ids.astype(np.uint8)).decode() for ids in all_documents(tmp_path / "o")]
    texts = make_texts(1200)
    a = texts[498:848]
    b = texts[848:]
    many = texts[:498]
    assert documents == [*a, *b, "".join(texts), "one two", "import os\n", *many]


def test_held_out_split_is_a_partition_by_document(corpus, reference, bpe):
    tokenizer = load_tokenizer(bpe)
    train, valid = (
        [tokenizer.decode(ids) for ids in all_documents(reference / side)] for side in "tv"
    )
    assert 0.07 < len(valid) / (len(train) + len(valid)) < 0.13
    assert not set(train) & set(valid)
    assert len(Dataset(reference / "t").headers) > 3


@pytest.mark.parametrize("workers", [2, pytest.param(3, marks=pytest.mark.long)])
def test_same_bytes_for_any_number_of_workers(corpus, reference, bpe, tmp_path, workers):
    run(
        "tokenize",
        corpus,
        "--output",
        tmp_path / "t",
        "--valid-output",
        tmp_path / "v",
        "--tokenizer",
        bpe,
        "--workers",
        workers,
        *OPTIONS,
    )
    assert files(tmp_path / "t") == files(reference / "t")
    assert files(tmp_path / "v") == files(reference / "v")


@pytest.mark.long
def test_same_bytes_for_any_number_of_ranks(corpus, reference, bpe, tmp_path):
    places = "--output", str(tmp_path / "t"), "--valid-output", str(tmp_path / "v")
    words = "tokenize", str(corpus), *places, "--tokenizer", str(bpe), "--json", *OPTIONS
    done = mpirun(2, [*PROGRAM, *words])
    assert json.loads(done.stdout)["documents"] > 1000  # once, by one rank
    assert files(tmp_path / "t") == files(reference / "t")
    assert files(tmp_path / "v") == files(reference / "v")


@pytest.mark.long
def test_bad_input_ends_all_ranks_with_one_line(corpus, tmp_path):
    (tmp_path / "in").mkdir()
    for number in range(6):
        (tmp_path / "in" / f"{number}.txt").write_bytes(b"fine " * 1000 + b"\xff" * (number == 3))
    places = str(tmp_path / "in"), "--output", str(tmp_path / "o")
    words = "tokenize", *places, "--tokenizer", "bytes", "--shard-tokens", "100000"
    done = mpirun(2, [*PROGRAM, *words], check=False)
    assert done.returncode == 2
    errors = [line for line in done.stderr.splitlines() if line.startswith("ptdmpi-data: error:")]
    assert len(errors) == 1 and "3.txt: byte 5000 is not UTF-8" in errors[0]
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "o").exists()


@pytest.mark.long
@pytest.mark.parametrize("workers", [1, 2])
def test_restart_after_a_kill_gives_the_same_bytes(corpus, reference, bpe, tmp_path, workers):
    arguments = [
        "tokenize",
        str(corpus),
        "--output",
        str(tmp_path / "t"),
        "--valid-output",
        str(tmp_path / "v"),
        "--tokenizer",
        str(bpe),
        "--workers",
        str(workers),
        *OPTIONS,
    ]
    process = subprocess.Popen([*COMMAND, *arguments], stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not len(list((tmp_path / "t").glob("*.h5"))) >= 2:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.005)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    finished = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "t").glob("*.h5")}
    refused = run("inspect", tmp_path / "t", check=False)
    assert refused.returncode == 2 and "unfinished" in refused.stderr
    run(*arguments)
    assert files(tmp_path / "t") == files(reference / "t")
    assert files(tmp_path / "v") == files(reference / "v")
    kept = [
        name for name, at in finished.items() if (tmp_path / "t" / name).stat().st_mtime_ns == at
    ]
    assert (
        len(kept) >= len(finished) - 1
    )  # not made again (but one that was renamed, yet not noted)


def test_long_held_out_document_and_a_stop_inside_it(tmp_path, monkeypatch):
    """A document of several tasks and shards stays on its side, also after a restart in it."""
    long = b"a line of text\n" * 260_000
    share = document_share(next(split_document([long]))[0])
    texts = filter(None, make_texts(100))
    short = next(text for text in texts if document_share(text.encode()) > share)
    (tmp_path / "a.txt").write_bytes(long)
    (tmp_path / "b.txt").write_text(short)

    def run_to(place):
        tokenize(
            monkeypatch, tmp_path / "a.txt", tmp_path / "b.txt", "--output", place / "t",
            "--valid-output", place / "v", "--valid-fraction", np.nextafter(share, 1),
            "--tokenizer", "bytes", "--shard-tokens", "600000", "--workers", "1",
        )  # fmt: skip

    run_to(tmp_path / "whole")
    (document,) = all_documents(tmp_path / "whole" / "v")
    assert document.astype(np.uint8).tobytes() == long
    assert len(Dataset(tmp_path / "whole" / "v").headers) == 4
    assert [ids.size for ids in all_documents(tmp_path / "whole" / "t")] == [len(short.encode())]
    for stop in (1, 2, 3):
        place = tmp_path / str(stop)
        saves = []
        save = RunState.save

        def save_and_stop(state, group, progress, saves=saves, save=save, stop=stop):
            save(state, group, progress)
            saves.append(progress)
            if len(saves) == stop:
                raise KeyboardInterrupt

        with monkeypatch.context() as patch, pytest.raises(SystemExit) as caught:
            patch.setattr(RunState, "save", save_and_stop)
            run_to(place)
        assert caught.value.code == 130 and saves[-1].shards == stop
        run_to(place)
        for side in "tv":
            assert files(place / side) == files(tmp_path / "whole" / side)


def test_nothing_to_do_changed_options_and_force(tmp_path, monkeypatch, capsys):
    (tmp_path / "a.txt").write_text("hello")
    arguments = [tmp_path / "a.txt", "--output", tmp_path / "o", "--tokenizer", "bytes"]
    tokenize(monkeypatch, *arguments)
    before = files(tmp_path / "o")
    tokenize(monkeypatch, *arguments)
    assert files(tmp_path / "o") == before
    for changed in ([*arguments, "--shard-tokens", "7"], arguments):
        if changed is arguments:
            (tmp_path / "a.txt").write_text("other text")
        with pytest.raises(SystemExit) as caught:
            tokenize(monkeypatch, *changed)
        assert caught.value.code == 2 and "--force" in capsys.readouterr().err
        assert files(tmp_path / "o") == before
    tokenize(monkeypatch, *arguments, "--force")
    assert all_documents(tmp_path / "o")[0].size == len("other text")


@pytest.mark.parametrize("shard_tokens", [1, 7, 1000])
def test_shards_end_at_documents_unless_one_is_too_long(tmp_path, monkeypatch, shard_tokens):
    texts = ["abc", "defgh", "i" * 50, "jk"]
    (tmp_path / "x.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    tokenize(
        monkeypatch,
        tmp_path / "x.jsonl",
        "--output",
        tmp_path / "o",
        "--tokenizer",
        "bytes",
        "--shard-tokens",
        shard_tokens,
    )
    dataset = Dataset(tmp_path / "o")
    tokens = np.concatenate([map_tokens(header) for header in dataset.headers])
    assert [part.size for part in np.split(tokens, np.flatnonzero(tokens == 256) + 1)][:-1] == [
        4,
        6,
        51,
        3,
    ]
    assert max(header.tokens for header in dataset.headers) <= 2 * shard_tokens
    if shard_tokens == 7:
        assert [header.tokens for header in dataset.headers] == [10, 14, 14, 14, 9, 3]


@pytest.mark.long
def test_splitting_a_long_document_keeps_its_tokens(tmp_path, monkeypatch, bpe):
    text = "\n".join(
        line for line in "".join(make_texts(2600, seed=3)).splitlines() if line.strip()
    )
    assert len(text.encode()) > 1 << 20
    (tmp_path / "x.txt").write_text(text)
    tokenize(monkeypatch, tmp_path / "x.txt", "--output", tmp_path / "o", "--tokenizer", bpe)
    (document,) = all_documents(tmp_path / "o")
    assert (document == load_tokenizer(bpe).encode([text])[0]).all()
