"""The list of a dataset's shards: a start reads only this list, and a shard that differs is
found."""

import json
from pathlib import Path

import h5py
import numpy as np
import pytest

from data_prep.cli import main
from ptdmpi.config import InputError
from ptdmpi.data import header as module
from ptdmpi.data.header import SUMMARY, listing, read_header
from ptdmpi.data.shard_writer import ShardWriter
from ptdmpi.data.shards import Dataset, find_headers, map_tokens

NAMES = ("a.h5", "b.h5", "c.h5")


def write_shard(path, first, tokens=50, sha256="ab" * 32):
    with ShardWriter(path, "t.json", sha256, vocab_size=1000, eod_id=999) as writer:
        writer.write(np.arange(first, first + tokens), np.array([20, tokens]))


def write_list(directory, value):
    (directory / SUMMARY).write_text(value if isinstance(value, str) else json.dumps(value))


@pytest.fixture
def listed(tmp_path):
    for number, name in enumerate(NAMES):
        write_shard(tmp_path / name, 100 * number)
    write_list(tmp_path, {"shards": listing(read_header(tmp_path / name) for name in NAMES)})
    return tmp_path


@pytest.fixture
def opened(monkeypatch):
    """The names of the files that HDF5 opens."""
    names = []
    file = h5py.File

    def count(path, *words, **options):
        if isinstance(path, Path):  # else the file in memory that a writer asks for offsets
            names.append(path.name)
        return file(path, *words, **options)

    monkeypatch.setattr(module.h5py, "File", count)
    return names


def test_a_start_looks_into_the_first_shard_only(listed, opened):
    dataset = Dataset(listed)
    assert opened == ["a.h5"] and dataset.samples(10) == 12 and dataset.token_count == 150
    dataset.read(np.array([4, 5, 6]), 10)
    assert opened == ["a.h5", "b.h5"]
    rows = dataset.read(np.arange(12), 10)
    assert rows[:, 0].tolist() == [100 * (n // 4) + 10 * (n % 4) for n in range(12)]
    assert dataset.documents(2).tolist() == [0, 20, 50]
    assert opened == list(NAMES)


def test_listed_headers_are_those_of_the_files(listed):
    headers = find_headers(listed)
    assert [header.listed for header in headers] == [False, True, True]
    (listed / SUMMARY).unlink()
    own = find_headers(listed)
    assert [module.confirmed(header) for header in headers] == own
    assert not any(header.listed for header in own)


@pytest.mark.parametrize("use_mmap", [True, False])
@pytest.mark.parametrize(
    ("first", "tokens", "message"),
    [(300, 50, "b.h5 has checksum crc32:"), (100, 60, "b.h5 has tokens 60, but tokenize.json")],
)
def test_a_replaced_shard_is_noticed_when_it_is_read(listed, use_mmap, first, tokens, message):
    write_shard(listed / "b.h5", first, tokens)
    dataset = Dataset(listed, use_mmap)
    dataset.read(np.array([0, 11]), 10)
    for look in (
        lambda: dataset.read(np.array([4]), 10),
        lambda: dataset.documents(1),
        lambda: map_tokens(dataset.headers[1]),
    ):
        with pytest.raises(InputError) as caught:
            look()
        assert message in str(caught.value) and "\n" not in str(caught.value)
    (listed / SUMMARY).unlink()  # as the message says
    assert Dataset(listed, use_mmap).read(np.array([4]), 10)[0, 0] == first


def test_a_replaced_first_shard_is_noticed_at_the_start(listed):
    write_shard(listed / "a.h5", 0, sha256="cd" * 32)
    with pytest.raises(InputError, match=r"a\.h5 has tokenizer_sha256 cdcd"):
        Dataset(listed)


def test_verify_compares_the_list(listed, monkeypatch, capsys):
    write_shard(listed / "c.h5", 300)
    monkeypatch.setattr("sys.argv", ["ptdmpi-data", "verify", str(listed)])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 2
    assert "c.h5 has checksum crc32:" in capsys.readouterr().out


def test_a_listed_shard_that_is_gone(listed):
    (listed / "b.h5").unlink()
    for value in (None, {"shards": list(NAMES)}):
        if value:
            write_list(listed, value)
        with pytest.raises(InputError, match=r"its tokenize.json lists 1 shard .* such as b.h5"):
            Dataset(listed)
    (listed / SUMMARY).unlink()
    assert Dataset(listed).token_count == 100


def test_shards_that_are_not_in_the_list(listed, opened):
    write_shard(listed / "d.h5", 300)
    opened.clear()
    dataset = Dataset(listed)
    assert dataset.token_count == 200 and sorted(opened) == ["a.h5", "d.h5"]


def test_a_list_of_names_alone(listed, opened):
    write_list(listed, {"shards": list(NAMES)})
    assert Dataset(listed).token_count == 150 and opened == list(NAMES)


def test_a_damaged_list(listed):
    good = json.loads((listed / SUMMARY).read_text())
    entry = good["shards"]["b.h5"]
    bad = [{**entry, "tokens": value} for value in (0, -1, "50", 50.0, True, None)]
    bad += [{**entry, "dtype": "<i8"}, {**entry, "more": 1}, {"tokens": 50}, 5, None, []]
    values = [{"shards": {**good["shards"], "b.h5": wrong}} for wrong in bad]
    for value in ("", "{", "[" * 100_000, "5", {}, {"shards": 5}, *values):
        write_list(listed, value)
        with pytest.raises(InputError) as caught:
            Dataset(listed)
        text = str(caught.value)
        assert f"{listed / SUMMARY}: is not a list of shards" in text and "\n" not in text, value
