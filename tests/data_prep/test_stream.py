"""Data sets that are read as a stream: from a folder, which `datasets` reads as it reads the hub,
and from a stand-in for the hub."""

import json
import re
import sys

import huggingface_hub
import pytest

from data_prep.cli import main
from data_prep.encode import EncodeOptions
from data_prep.stream import StreamedTexts, StreamOptions
from data_prep.text_corpus import TextCorpus, TextOptions
from ptdmpi.base.errors import InputError
from ptdmpi.data.header import read_header
from tests._mpirun import mpirun

datasets = pytest.importorskip("datasets")

CARD = """---
configs:
- config_name: short
  data_files: [{split: train, path: short/*.jsonl}, {split: test, path: held/*.jsonl}]
- config_name: long
  data_files: [{split: train, path: long/*.jsonl}]
---
"""


def texts(name, count):
    return [f"{name} {number} " + "word " * (number % 7) for number in range(count)]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Make a data set of two subsets, one of them of two files and two splits."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.chdir(tmp_path)
    files = {"short/a": 40, "short/b": 30, "held/a": 5, "long/a": 3}
    for name, count in files.items():
        path = tmp_path / "set" / f"{name}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts(name, count)))
    (tmp_path / "set/README.md").write_text(CARD)
    return tmp_path


def run(monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["ptdmpi-data", *map(str, words)])
    main()


def refused(monkeypatch, capsys, *words):
    with pytest.raises(SystemExit) as caught:
        run(monkeypatch, *words)
    error = capsys.readouterr().err
    assert caught.value.code == 2 and error.count("\n") == 1, error
    return error


def tokenize(monkeypatch, output, *words):
    usual = ("--tokenizer", "bytes", "--workers", "1", "--quiet", "--output", output)
    run(monkeypatch, "tokenize", *words, *usual)


def headers(output):
    return [read_header(path) for path in sorted(output.glob("*.h5"))]


def read(options):
    """Return the texts of a stream, file by file."""
    streamed = StreamedTexts("set", "text", options)
    return [
        [
            chunk.data[sum(chunk.lengths[:at]) :][:length].decode()
            for task in streamed.tasks(group, lambda read: None)
            for chunk in task.chunks
            for at, length in enumerate(chunk.lengths)
        ]
        for group in range(len(streamed.group_bytes))
    ]


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (StreamOptions("short"), [texts("short/a", 40), texts("short/b", 30)]),
        (StreamOptions("short", "test"), [texts("held/a", 5)]),
        (StreamOptions("long", documents=9), [texts("long/a", 3)]),
        (
            StreamOptions("short", documents=45),
            [texts("short/a", 40) + texts("short/b", 30)[:5]],
        ),
    ],
)
def test_a_stream_has_the_texts_of_its_subset_and_split(folder, options, expected):
    assert read(options) == expected


def test_a_stream_makes_the_shards_of_its_files(folder, monkeypatch):
    """Also the same tokenizer; and a finished output stays finished."""
    tokenize(monkeypatch, "stream", "set", "--stream", "--subset", "short")
    # two groups, as a stream has one for each file: files of a group of their own
    tokenize(monkeypatch, "files", "set/short", "--shard-tokens", "1")
    streamed, whole = headers(folder / "stream"), headers(folder / "files")
    assert len(streamed) == 2
    assert sum(header.tokens for header in streamed) == sum(header.tokens for header in whole)
    for words, name in ((("set", "--stream", "--subset", "short"), "a"), (("set/short",), "b")):
        run(
            monkeypatch,
            "train-tokenizer",
            *words,
            "--vocab-size",
            "270",
            "--output",
            f"{name}.json",
        )
    assert (folder / "a.json").read_bytes() == (folder / "b.json").read_bytes()


class Broken:
    """Rows of a stream that breaks off after some of them."""

    def __init__(self, rows, left):
        self._rows = rows
        self._left = left
        self.num_shards = rows.num_shards

    def shard(self, **keys):
        return Broken(self._rows.shard(**keys), self._left)

    def __iter__(self):
        for row in self._rows:
            if not self._left:
                raise ConnectionError("the server\nwent away.")
            self._left -= 1
            yield row


@pytest.mark.cases(1)
@pytest.mark.parametrize("left", [13, 0])
def test_a_stream_that_breaks_off_is_continued(folder, monkeypatch, capsys, left):
    """The shards are those of a command that was not interrupted."""
    words = ("tokenize", "set", "--stream", "--subset", "short", "--tokenizer", "bytes")
    words = (*words, "--shard-tokens", "100", "--workers", "1", "--quiet", "--output")
    run(monkeypatch, *words, "whole")
    load = datasets.load_dataset
    with monkeypatch.context() as patch:
        patch.setattr(datasets, "load_dataset", lambda *a, **k: Broken(load(*a, **k), left))
        error = refused(patch, capsys, *words, "out")
    assert "set (short, train), file 0: cannot be read to its end: the server; run the" in error
    run(monkeypatch, *words, "out")
    assert headers(folder / "out") != []
    checksums = [
        [header.checksum for header in headers(folder / name)] for name in ("out", "whole")
    ]
    assert checksums[0] == checksums[1]


@pytest.mark.together
@pytest.mark.long
def test_files_of_a_stream_are_divided_among_ranks(folder, monkeypatch):
    tokenize(monkeypatch, "alone", "set", "--stream", "--subset", "short")
    words = ["-m", "data_prep.cli", "tokenize", "set", "--stream", "--subset", "short"]
    mpirun(2, [*words, "--tokenizer", "bytes", "--output", str(folder / "two")])
    names = [path.name for path in sorted((folder / "alone").glob("*.h5"))]
    assert len(names) == 2
    for name in names:
        assert (folder / "alone" / name).read_bytes() == (folder / "two" / name).read_bytes()


@pytest.fixture
def hub(folder, monkeypatch):
    """Let the folder `set` stand for org/set on the hub; return the revisions that are read."""
    asked = []
    load = datasets.load_dataset

    class Api:
        def dataset_info(self, name):
            if name != "org/set":
                raise OSError(f"Repository Not Found: {name}.\nmore lines")
            return type("Info", (), {"sha": f"commit{len(asked)}"})

    def load_dataset(name, *subset, revision, **keys):
        asked.append((name, revision))
        return load("set", *subset, **keys)

    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    return asked


def test_a_continued_stream_needs_the_same_revision(hub, monkeypatch, capsys):
    words = ("org/set", "--stream", "--subset", "short")
    tokenize(monkeypatch, "out", *words)
    usual = ("--tokenizer", "bytes", "--output", "out")
    error = refused(monkeypatch, capsys, "tokenize", *words, *usual)
    assert "out: holds shards made with revision commit0" in error
    tokenize(monkeypatch, "out", "org/set@commit0", *words[1:])
    assert hub == [("org/set", f"commit{n}") for n in (0, 1, 0)]


@pytest.mark.cases(3)
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["set", "--stream", "--subset", "no"], r"set \(no, train\): BuilderConfig 'no' not found"),
        (["set", "--stream", "--subset", "long", "--split", "no"], "Bad split: no. Available"),
        (["set", "--stream", "--subset", "long", "--text-field", "no"], "no column 'no', but text"),
        (["set", "--stream"], "Config name is missing"),
        (["a", "b", "--stream"], "--stream reads one data set"),
        (["set", "--stream", "--suffix", ".py"], "and no --suffix"),
        (["set", "--documents", "3"], "--documents belongs to --stream"),
        (
            ["nothing", "--stream"],
            "is neither a directory nor the name of a data set",
        ),
        (["org/no", "--stream"], "Repository Not Found: org/no; where there is network, run hf do"),
    ],
)
def test_what_cannot_be_streamed_is_refused(hub, monkeypatch, capsys, words, message):
    usual = ("--tokenizer", "bytes", "--output", "out", "--workers", "1")
    with pytest.raises(SystemExit) as caught:
        run(monkeypatch, "tokenize", *words, *usual)
    error = capsys.readouterr().err
    assert caught.value.code == 2 and error.count("\n") == 1
    assert re.search(message, error), error


def test_a_folder_with_a_link_to_nothing_is_not_streamed(folder, monkeypatch, capsys):
    (folder / "set/held/gone.jsonl").symlink_to("nothing")
    words = ("tokenize", "set", "--stream", "--subset", "short", "--tokenizer", "bytes")
    error = refused(monkeypatch, capsys, *words, "--quiet", "--output", "out")
    assert "gone.jsonl: is a link to a missing file (1 unusable file in set)" in error
    (folder / "set/held/gone.jsonl").unlink()
    (folder / "set/linked").symlink_to(folder / "set/held")
    error = refused(monkeypatch, capsys, *words, "--quiet", "--output", "out")
    assert "linked: is a link to a folder, which is not followed" in error
    assert not (folder / "out").exists()


def test_a_row_without_a_text_is_refused(folder):
    (folder / "set/long/a.jsonl").write_text('{"text": "a"}\n{"text": null}\n')
    with pytest.raises(InputError, match=r"set \(long, train\): row 1: no text in the column"):
        read(StreamOptions("long"))


def test_without_the_library_one_line_names_it(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "datasets", None)
    encode = EncodeOptions("bytes", "text", "strict", 0.0)
    options = TextOptions((str(tmp_path),), encode, stream=StreamOptions())
    from data_prep.corpus import OutputOptions

    with pytest.raises(InputError, match=r"package datasets: pip install 'ptdmpi\[corpus\]'"):
        TextCorpus(options, OutputOptions(tmp_path / "out"))
