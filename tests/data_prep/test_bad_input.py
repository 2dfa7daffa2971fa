"""Bad input: one clear line, exit code 2, nothing left behind."""

import gzip
import json
import os
import resource
import subprocess
import sys
from importlib.util import find_spec

import numpy as np
import pytest
import zstandard

from data_prep import sources
from data_prep.cli import main
from data_prep.state import RunState
from ptdmpi.config import InputError
from ptdmpi.data.shard_writer import ShardWriter


def fail(monkeypatch, capsys, *arguments):
    """The one line on stderr of a command that must fail."""
    monkeypatch.setattr(sys, "argv", ["ptdmpi-data", *map(str, arguments)])
    with pytest.raises(SystemExit) as caught:
        main()
    output = capsys.readouterr()
    assert caught.value.code == 2 and output.out == ""
    assert output.err.startswith("ptdmpi-data: error: ") and output.err.count("\n") == 1
    return output.err


LINE = json.dumps({"text": "fine"}).encode() + b"\n"
CONTENTS = {
    "a.txt": (b"good \xc3\xa9 then \xff bad", "a.txt: byte 13 is not UTF-8"),
    "late.txt": (b"line\n" * 400_000 + b"\x80", "late.txt: byte 2000000 is not UTF-8"),
    "a.jsonl": (LINE * 2 + b'{"text": "\xff"}', "a.jsonl: byte 44 is not UTF-8"),
    "late.jsonl": (LINE * 80_000 + b"{text", "late.jsonl:80001: not a JSON line"),
    "b.jsonl": (LINE + b"\n{broken\n", "b.jsonl:3: not a JSON line"),
    "c.jsonl": (
        LINE * 3 + b'{"body": "x"}\n',
        "c.jsonl:4: no JSON object with a text in the field 'text'",
    ),
    "d.jsonl": (b'["text"]', "d.jsonl:1: no JSON object"),
    "e.jsonl": (b'{"text": null}', "e.jsonl:1: no JSON object"),
    "f.jsonl": (rb'{"text": "\ud800"}', "f.jsonl:1: the text has a lone surrogate"),
    "g.jsonl": (b"[" * 100_000, "g.jsonl:1: not a JSON line"),
    "a.txt.gz": (gzip.compress(b"text" * 1000)[:-9], "a.txt.gz: cannot be read"),
    "b.txt.gz": (b"no gzip", "b.txt.gz: cannot be read"),
    "a.txt.zst": (zstandard.compress(os.urandom(5000))[:-3], "a.txt.zst: cannot be read"),
    "b.txt.zst": (b"no zstd at all", "b.txt.zst: cannot be read"),
    "empty.txt": (b"", "no token to train on"),
    "empty.jsonl": (b'\n{"text": ""}\n', "no token to train on"),
    "x.bin": (b"text", "x.bin: unknown kind of file; usable are .txt, .jsonl"),
}


def test_names_with_line_ends_stay_in_one_line(tmp_path, monkeypatch, capsys):
    words = ("tokenize", "--output", tmp_path / "o", "--tokenizer", "bytes")
    bad = tmp_path / "a\nb.jsonl"
    bad.write_text("no JSON")
    assert "a\\nb.jsonl:1: not a JSON" in fail(monkeypatch, capsys, *words, bad)
    assert "c\\nd.txt: no such file" in fail(monkeypatch, capsys, *words, tmp_path / "c\nd.txt")


@pytest.mark.parametrize("name", CONTENTS)
def test_bad_corpus(tmp_path, monkeypatch, capsys, name):
    content, message = CONTENTS[name]
    (tmp_path / name).write_bytes(content)
    error = fail(
        monkeypatch,
        capsys,
        "tokenize",
        tmp_path / name,
        "--output",
        tmp_path / "o",
        "--tokenizer",
        "bytes",
        "--workers",
        "1",
    )
    assert message in error
    assert os.listdir(tmp_path) == [name]


def test_errors_replace_takes_them(tmp_path, monkeypatch):
    for name in ("a.txt", "a.jsonl", "f.jsonl"):
        (tmp_path / name).write_bytes(CONTENTS[name][0])
    monkeypatch.setattr(
        sys,
        "argv",
        [
            "ptdmpi-data",
            "tokenize",
            str(tmp_path),
            "--output",
            str(tmp_path / "o"),
            "--tokenizer",
            "bytes",
            "--errors",
            "replace",
        ],
    )
    main()
    assert os.listdir(tmp_path / "o") != []


def test_error_in_a_worker_process(tmp_path, monkeypatch, capsys):
    (tmp_path / "a.txt").write_bytes(b"line\n" * 10**6 + b"\x80")
    error = fail(
        monkeypatch,
        capsys,
        "tokenize",
        tmp_path / "a.txt",
        "--output",
        tmp_path / "o",
        "--tokenizer",
        "bytes",
        "--workers",
        "2",
    )
    assert "byte 5000000" in error
    assert os.listdir(tmp_path) == ["a.txt"]


@pytest.fixture
def good(tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "a.txt").write_text("hello")
    return folder


@pytest.mark.parametrize(
    "name",
    [
        "tokenizer.json",
        "template",
        pytest.param(
            "a.model", marks=pytest.mark.skipif(not find_spec("sentencepiece"), reason="")
        ),
    ],
)
def test_a_device_without_an_end_is_not_read(good, monkeypatch, capsys, name):
    (good.parent / name).symlink_to("/dev/null")
    words = ["tokenize", good, "--output", good.parent / "o", "--tokenizer", good.parent / name]
    if name == "template":
        words = ["chat", *words[1:4], "--tokenizer", "bytes", "--seq-length", 16]
        words += ["--template", good.parent / name]
    assert "is a pipe or a device, not a file" in fail(monkeypatch, capsys, *words)


def test_bad_arguments(good, monkeypatch, capsys):
    output = good.parent / "o"

    def error(*arguments):
        return fail(monkeypatch, capsys, "tokenize", *arguments, "--output", output)

    empty = good.parent / "empty"
    empty.mkdir()
    (good.parent / "bad.json").write_text("{}")
    assert "none.txt: no such file" in error(good / "none.txt", "--tokenizer", "bytes")
    assert "usable are .txt, .jsonl, .py" in error(empty, "--tokenizer", "bytes", "--suffix", ".py")
    assert ".parquet; --suffix adds others" in error(empty, "--tokenizer", "bytes")
    assert "given twice" in error(good, good / "a.txt", "--tokenizer", "bytes")
    assert "none.json" in error(good, "--tokenizer", "none.json")
    assert "bad.json" in error(good, "--tokenizer", good.parent / "bad.json")
    assert "belong together" in error(good, "--tokenizer", "bytes", "--valid-fraction", "0.1")
    assert "belong together" in error(good, "--tokenizer", "bytes", "--valid-output", empty)
    assert "must be in [0, 1)" in error(
        good, "--tokenizer", "bytes", "--valid-fraction", "1.5", "--valid-output", empty
    )
    assert "two directories" in error(
        good, "--tokenizer", "bytes", "--valid-fraction", "0.5", "--valid-output", output
    )
    assert "--workers" in error(good, "--tokenizer", "bytes", "--workers", "0")
    assert not output.exists() and os.listdir(empty) == []


def test_nothing_held_out_leaves_nothing(good, monkeypatch, capsys):
    output = good.parent / "o"
    valid = good.parent / "v"
    error = fail(
        monkeypatch,
        capsys,
        "tokenize",
        good,
        "--output",
        output,
        "--tokenizer",
        "bytes",
        "--valid-fraction",
        "1e-9",
        "--valid-output",
        valid,
    )
    assert "was held out, which is decided by the hash" in error
    assert error.endswith("or --valid-fraction 0.5\n")
    assert not output.exists() and not valid.exists()


def test_foreign_shards_are_never_removed(good, monkeypatch, capsys):
    output = good.parent / "o"
    output.mkdir()
    (output / "mine.h5").write_text("precious")
    for force in ([], ["--force"]):
        error = fail(
            monkeypatch,
            capsys,
            "tokenize",
            good,
            "--output",
            output,
            "--tokenizer",
            "bytes",
            *force,
        )
        assert "unknown origin" in error
    assert (output / "mine.h5").read_text() == "precious"


def test_output_that_is_a_file(good, monkeypatch, capsys):
    output = good.parent / "o"
    output.write_text("a file")
    words = ["--output", output, "--tokenizer", "bytes"]
    assert "o: is not a directory" in fail(monkeypatch, capsys, "tokenize", good, *words)
    words[1] = output / "below"
    error = fail(monkeypatch, capsys, "tokenize", good, *words)
    assert "below: cannot be written" in error and "--force" not in error
    assert output.read_text() == "a file"


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "limit",
    [100, 4_990_000, *(pytest.param(n, marks=pytest.mark.long) for n in (0, 100_000, 5_010_000))],
)
def test_full_disk(tmp_path, limit):
    """Simulated by a small RLIMIT_FSIZE: the kernel refuses to let a file grow beyond it. The
    limits hit the state, the first block, the last blocks, and the metadata at the end."""
    (tmp_path / "a.txt").write_text("some text\n" * 250_000)  # 2.5 M tokens: 5 MB
    words = ["tokenize", tmp_path / "a.txt", "--output", tmp_path / "o", "--tokenizer", "bytes"]
    done = subprocess.run(
        [sys.executable, "-m", "data_prep.cli", *words, "--workers", "1"],
        capture_output=True,
        text=True,
        timeout=60,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
    )
    assert done.returncode == 2, done.stderr
    place = "shard " if limit > 100 else f"{tmp_path}/o/.unfinished/identity.json: "
    assert done.stderr.startswith(f"ptdmpi-data: error: {place}") and done.stderr.count("\n") == 1
    assert "cannot be written" in done.stderr
    assert os.listdir(tmp_path) == ["a.txt"]


def test_too_long_a_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sources, "MAX_LINE_BYTES", 3_000_000)
    (tmp_path / "a.jsonl").write_bytes(LINE + b'{"text": "' + b"x" * 4_000_000 + b'"}')
    error = fail(
        monkeypatch,
        capsys,
        "tokenize",
        tmp_path / "a.jsonl",
        "--output",
        tmp_path / "o",
        "--tokenizer",
        "bytes",
        "--workers",
        "1",
    )
    assert "a.jsonl: byte " in error and ": a line is longer" in error


def write_shard(path, tokens, **changes):
    vocabulary = {
        "tokenizer": "t",
        "tokenizer_sha256": "0" * 64,
        "vocab_size": 300,
        "eod_id": 0,
        **changes,
    }
    with ShardWriter(path, **vocabulary) as writer:
        writer.write(np.asarray(tokens), np.array([len(tokens)]))


def verify(monkeypatch, capsys, path):
    monkeypatch.setattr(sys, "argv", ["ptdmpi-data", "verify", str(path), "--json"])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 2
    return json.loads(capsys.readouterr().out)["problems"]


def test_verify_names_each_problem(tmp_path, monkeypatch, capsys):
    write_shard(tmp_path / "a.h5", np.arange(100))
    write_shard(tmp_path / "b.h5", np.arange(100), vocab_size=301)
    assert "b.h5 has vocab_size 301" in verify(monkeypatch, capsys, tmp_path)[0]
    content = bytearray((tmp_path / "b.h5").read_bytes())
    at = content.find(np.arange(50, 60, dtype="<u2").tobytes())
    content[at : at + 2] = b"\xff\xff"
    (tmp_path / "b.h5").write_bytes(content)
    os.truncate(tmp_path / "a.h5", 9000)
    problems = verify(monkeypatch, capsys, tmp_path)
    assert [
        name in problem
        for name, problem in zip(
            ("a.h5", "token 50 has id 65535", "checksum"), problems, strict=True
        )
    ] == [True] * 3


def test_verify_and_inspect_without_shards(tmp_path, monkeypatch, capsys):
    for command in ("inspect", "verify"):
        assert "no *.h5 file" in fail(monkeypatch, capsys, command, tmp_path)
        missing = tmp_path / "none.h5"
        assert "none.h5: no such file or directory" in fail(monkeypatch, capsys, command, missing)


def test_bad_tokenizer_training(good, monkeypatch, capsys):
    def error(*arguments):
        return fail(monkeypatch, capsys, "train-tokenizer", *arguments, "--output", good / "t.json")

    assert "--vocab-size 256: legal are 257" in error(good, "--vocab-size", "256")
    (good / "a.txt").write_text("")
    assert "no text to learn from" in error(good, "--vocab-size", "300")
    assert not (good / "t.json").exists()


@pytest.fixture
def split(tmp_path):
    """Arguments of a run with held-out documents; their last ones are the two outputs."""
    lines = [json.dumps({"text": f"document {number}"}) for number in range(40)]
    (tmp_path / "docs.jsonl").write_text("\n".join(lines))
    words = [tmp_path / "docs.jsonl", "--tokenizer", "bytes", "--valid-fraction", "0.5"]
    return [*words, "--workers", "1", "--output", tmp_path / "o", "--valid-output", tmp_path / "v"]


def tokenize(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["ptdmpi-data", "tokenize", *map(str, arguments)])
    main()


def test_nothing_half_written_where_a_shard_cannot_be_ended(split, monkeypatch, capsys):
    def close(writer):
        raise InputError("the disk is full")

    monkeypatch.setattr(ShardWriter, "close", close)
    assert "the disk is full" in fail(monkeypatch, capsys, "tokenize", *split)
    assert not split[-1].exists() and not split[-3].exists()


def test_held_out_shards_belong_to_their_training_shards(split, monkeypatch, capsys):
    tokenize(monkeypatch, *split)
    capsys.readouterr()
    other = split[-1].with_name("v2")
    error = fail(monkeypatch, capsys, "tokenize", *split[:-1], other)
    assert "o: holds shards made with valid_outputs ['../v']" in error and not other.exists()
    next(split[-1].glob("*.h5")).unlink()
    assert "shard-00000-00000.h5, made by an earlier run, is missing" in fail(
        monkeypatch, capsys, "tokenize", *split
    )
    tokenize(monkeypatch, *split, "--force")
    assert any(split[-1].glob("*.h5"))


@pytest.mark.parametrize("force", [(), ("--force",)])
def test_training_shards_are_not_replaced_by_held_out_ones(split, monkeypatch, capsys, force):
    precious = split[-1].with_name("x")
    tokenize(monkeypatch, split[0], "--tokenizer", "bytes", "--output", precious)
    before = {path.name: path.read_bytes() for path in precious.iterdir()}
    capsys.readouterr()
    error = fail(monkeypatch, capsys, "tokenize", *split[:-1], precious, *force)
    assert "x: holds " in error
    assert {path.name: path.read_bytes() for path in precious.iterdir()} == before


def test_a_finished_shard_that_goes_before_the_end_is_missed(split, monkeypatch, capsys):
    finish = RunState.finish

    def lose_one(state, *words):
        next(state.outputs[0].glob("*.h5")).unlink()
        return finish(state, *words)

    monkeypatch.setattr(RunState, "finish", lose_one)
    words = [*split, "--shard-tokens", "40"]
    assert "of an earlier start are missing" in fail(monkeypatch, capsys, "tokenize", *words)


def test_inputs_that_are_no_files(tmp_path, monkeypatch, capsys):
    os.mkfifo(tmp_path / "pipe.txt")
    (tmp_path / "cut.txt.zst").touch()
    for name, message in (
        (tmp_path / "pipe.txt", "is not a regular file"),
        (tmp_path / "cut.txt.zst", "is empty, so it is not a .zst file"),
        ("", "an input without a name"),
    ):
        words = ["--output", tmp_path / "o", "--tokenizer", "bytes"]
        assert message in fail(monkeypatch, capsys, "tokenize", name, *words)
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize("command", ["tokenize", "train-tokenizer"])
def test_a_folder_is_read_whole_or_not_at_all(good, monkeypatch, capsys, command):
    words = [command, good, "--output", good.parent / "o"]
    words += ["--tokenizer", "bytes"] if command == "tokenize" else ["--vocab-size", 300]
    # the endings of these three are not read, so the files do not matter
    (good / "b.md").symlink_to("nothing")
    os.mkfifo(good / "pipe")
    (good / "zero").symlink_to("/dev/zero")
    (good / "z.jsonl").symlink_to("/dev/zero")
    assert "z.jsonl: is a pipe or a device (1 unusable file in" in fail(monkeypatch, capsys, *words)
    os.mkfifo(good / "y.txt")
    (good / "sub").mkdir()
    (good / "sub" / "x.parquet").symlink_to("loop.parquet")
    error = fail(monkeypatch, capsys, *words)
    assert "y.txt: is a pipe or a device (3 unusable files in" in error
    (good / "b.txt.gz").symlink_to("nothing")
    error = fail(monkeypatch, capsys, *words)
    assert "b.txt.gz: is a link to a missing file (4 unusable files in" in error
    (good / "linked").symlink_to(good / "sub")
    error = fail(monkeypatch, capsys, *words)
    assert "linked: is a link to a folder, which is not followed; remove the link, or" in error
    assert not (good.parent / "o").exists()
