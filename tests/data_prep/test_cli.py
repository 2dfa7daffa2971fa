"""The other commands of `ptdmpi-data`, and what its processes do when they are stopped."""

import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import psutil
import pytest

from data_prep.cli import main
from data_prep.vocabulary import load_tokenizer
from ptdmpi.config import InputError


def run(monkeypatch, capsys, *arguments):
    monkeypatch.setattr(sys, "argv", ["ptdmpi-data", *map(str, arguments)])
    main()
    return capsys.readouterr().out


@pytest.fixture
def corpus(tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    for number in range(20):
        (folder / f"{number:02}.txt").write_text(
            f"the number {number} and its text\n" * (number + 1)
        )
    return folder


def test_training_a_tokenizer_is_deterministic(corpus, tmp_path, monkeypatch, capsys):
    for name in ("a.json", "b.json"):
        arguments = (corpus, "--output", tmp_path / "new" / name, "--vocab-size", 280, "--json")
        table = json.loads(run(monkeypatch, capsys, "train-tokenizer", *arguments))
        assert table["vocab_size"] == 280
    first, second = ((tmp_path / "new" / name).read_bytes() for name in ("a.json", "b.json"))
    assert first == second
    tokenizer = load_tokenizer(tmp_path / "new" / "a.json")
    assert (tokenizer.vocab_size, tokenizer.eod_id) == (280, 0)
    text = "new text: 🙂\0\n"
    assert tokenizer.decode(tokenizer.encode([text])[0]) == text  # every byte has an entry


def test_sample_of_the_text(corpus, tmp_path, monkeypatch, capsys):
    size = sum(path.stat().st_size for path in corpus.iterdir())
    for name, options in (
        ("all", []),
        ("same", ["--sample-bytes", size]),
        ("few", ["--sample-bytes", 900]),
    ):
        arguments = (corpus, "--output", tmp_path / name, "--vocab-size", 400, *options)
        run(monkeypatch, capsys, "train-tokenizer", *arguments)
    assert (tmp_path / "all").read_bytes() == (tmp_path / "same").read_bytes()
    assert (tmp_path / "all").read_bytes() != (tmp_path / "few").read_bytes()


def test_special_tokens_in_the_text_are_text(corpus, tmp_path, monkeypatch, capsys):
    run(
        monkeypatch,
        capsys,
        "train-tokenizer",
        corpus,
        "--output",
        tmp_path / "t",
        "--vocab-size",
        300,
    )
    tokenizer = load_tokenizer(tmp_path / "t")
    (ids,) = tokenizer.encode(["a<|endoftext|>b"])
    assert tokenizer.eod_id not in ids and tokenizer.decode(ids) == "a<|endoftext|>b"


def test_tokenizer_without_an_end_gets_a_new_id(tmp_path):
    from tokenizers import Tokenizer, models

    Tokenizer(models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")])).save(str(tmp_path / "t.json"))
    tokenizer = load_tokenizer(tmp_path / "t.json")
    assert (tokenizer.vocab_size, tokenizer.eod_id) == (4, 3)
    assert tokenizer.encode(["abba"])[0].tolist() == [2, 1, 0]


TOLD = {
    "llama 3": ({"<|end_of_text|>": 1}, {}, 1),
    "gemma": ({"<eos>": 1, "</s>": 2}, {}, 1),
    "bert": ({"[SEP]": 1}, {"tokenizer_config.json": {"cls_token": "[CLS]"}}, 1),
    "a name": ({"</s>": 1, "<end>": 2}, {"tokenizer_config.json": {"eos_token": "<end>"}}, 2),
    "a table": ({"<end>": 2}, {"tokenizer_config.json": {"eos_token": {"content": "<end>"}}}, 2),
    "an id": ({"</s>": 1, "<end>": 2}, {"config.json": {"eos_token_id": 2}}, 2),
    "ids": ({"</s>": 1, "<end>": 2}, {"generation_config.json": {"eos_token_id": [9, 2, 1]}}, 2),
    "none": ({"</s>": 1}, {"tokenizer_config.json": {"eos_token": None}, "config.json": {}}, 1),
    "no token": ({"</s>": 1}, {"tokenizer_config.json": {"eos_token": "<other>"}}, 1),
}


@pytest.mark.parametrize("special, files, expected", TOLD.values(), ids=TOLD)
def test_the_end_is_what_files_beside_the_tokenizer_name(tmp_path, special, files, expected):
    from tokenizers import Tokenizer, models

    made = Tokenizer(models.WordLevel({"a": 0, **special}, "a"))
    made.save(str(tmp_path / "tokenizer.json"))
    before = load_tokenizer(tmp_path / "tokenizer.json")
    for name, said in files.items():
        (tmp_path / name).write_text(json.dumps(said))
    tokenizer = load_tokenizer(tmp_path / "tokenizer.json")
    assert (tokenizer.eod_id, tokenizer.sha256) == (expected, before.sha256)
    (tmp_path / "config.json").write_text("[")
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(InputError, match=r"tokenizer_config.json: is not a JSON object"):
        load_tokenizer(tmp_path / "tokenizer.json")


@pytest.mark.parametrize("name", ["bytes", "bpe"])
def test_inspect_and_verify(corpus, tmp_path, monkeypatch, capsys, name):
    if name == "bpe":
        name = tmp_path / "t.json"
        run(monkeypatch, capsys, "train-tokenizer", corpus, "--output", name, "--vocab-size", 300)
    output = tmp_path / "o"
    run(monkeypatch, capsys, "tokenize", corpus, "--output", output, "--tokenizer", name,
        "--shard-tokens", 1000)  # fmt: skip
    described = json.loads(run(monkeypatch, capsys, "inspect", output, "--json"))
    assert described["documents"] == 20
    assert described["tokens"] == sum(shard["tokens"] for shard in described["shards"])
    assert described["first_text"].startswith("the number 0")
    first = np.array(described["first_tokens"])
    assert load_tokenizer(name).decode(first) == described["first_text"]
    text = run(monkeypatch, capsys, "inspect", output)
    assert f"{described['tokens']:,} tokens" in text and described["tokenizer_sha256"] in text
    shard = described["shards"][-1]["path"]
    assert (
        json.loads(run(monkeypatch, capsys, "inspect", shard, "--json"))["shards"][0]["path"]
        == shard
    )
    assert "all sound" in run(monkeypatch, capsys, "verify", output)
    (output / "tokenizer.json").write_text("another")
    if name == "bytes":  # the file is not of these shards
        assert "all sound" in run(monkeypatch, capsys, "verify", output)
    else:
        with pytest.raises(SystemExit, match="2"):
            run(monkeypatch, capsys, "verify", output)
        (problem,) = capsys.readouterr().out.splitlines()
        recorded = described["tokenizer_sha256"]
        assert f"{output / 'tokenizer.json'}: has sha256 " in problem and recorded in problem
        (output / "tokenizer.json").unlink()
        (output / "tokenizer.json").symlink_to("/dev/zero")
        with pytest.raises(SystemExit, match="2"):
            run(monkeypatch, capsys, "verify", output)
        assert "is a pipe or a device" in capsys.readouterr().out
        assert "all sound" in run(monkeypatch, capsys, "verify", shard)
    described = json.loads(run(monkeypatch, capsys, "inspect", shard, "--json"))
    assert (described["first_text"] is None) == (name != "bytes")


@pytest.mark.long
@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_stopping_ends_the_workers_too(tmp_path, sent, code):
    letters = np.random.default_rng(0).integers(97, 123, 40_000_000, dtype=np.uint8)
    words = letters.tobytes().decode()
    (tmp_path / "a.txt").write_text("\n".join(words[i : i + 7] for i in range(0, len(words), 7)))
    (tmp_path / "t.json").write_text(
        json.dumps({"version": "1.0", "model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}})
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "data_prep.cli", "tokenize", tmp_path / "a.txt", "--workers", "2",
         "--output", tmp_path / "o", "--tokenizer", tmp_path / "t.json"],
        stderr=subprocess.PIPE, text=True, start_new_session=True,
        # whoever runs the tests in the background hands down that it is ignored
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    deadline = time.monotonic() + 30
    while len(psutil.Process(process.pid).children()) < 3:  # while they start, too
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    children = psutil.Process(process.pid).children()
    # a terminal's Ctrl-C is for all of its processes
    os.killpg(process.pid, sent) if sent == signal.SIGINT else process.send_signal(sent)
    error = process.communicate(timeout=30)[1]
    assert process.returncode == code
    gone, alive = psutil.wait_procs(children, timeout=30)
    assert len(gone) == 3 and not alive
    if sent == signal.SIGINT:
        assert error.strip() == "ptdmpi-data: interrupted; run the same command again to continue"
        assert not (tmp_path / "o").exists()


def test_too_little_text_is_noted(corpus, tmp_path, monkeypatch, capsys):
    arguments = ("--output", tmp_path / "t.json", "--vocab-size", 100_000)
    monkeypatch.setattr(
        sys, "argv", ["ptdmpi-data", "train-tokenizer", str(corpus), *map(str, arguments)]
    )
    main()
    out, error = capsys.readouterr()
    entries = int(out.split()[-2])
    assert 257 <= entries < 1000
    assert f"--vocab-size 100000: the tokenizer has {entries} entries" in error


def test_bad_lines_are_left_out_and_counted(tmp_path, monkeypatch, capsys):
    good = [json.dumps({"text": f"line {number}"}) for number in range(5)]
    bad = ["{", "[]", '{"text": 3}', '{"text": "\\ud800"}']
    text = "\n".join([good[0], *bad, "", *good[1:]]).encode() + b'\n{"text": "\xff"}\n'
    (tmp_path / "a.jsonl").write_bytes(text)
    (tmp_path / "b.jsonl").write_text("\n".join(good))
    tables = []
    for name in ("a", "b"):
        words = ("tokenize", tmp_path / f"{name}.jsonl", "--output", tmp_path / name, "--json")
        words += ("--tokenizer", "bytes", "--skip-bad-lines")
        tables.append(json.loads(run(monkeypatch, capsys, *words)))
    assert [table["bad_lines"] for table in tables] == [5, 0]
    assert [table["documents"] for table in tables] == [5, 5]
    assert tables[0]["train_tokens"] == tables[1]["train_tokens"]
    words = ("train-tokenizer", tmp_path / "a.jsonl", "--output", tmp_path / "t.json")
    run(monkeypatch, capsys, *words, "--vocab-size", "260", "--skip-bad-lines")
