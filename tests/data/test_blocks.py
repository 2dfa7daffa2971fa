"""Checksums of shards: damaged tokens, offsets and weights are found when they are read."""

import json
import zlib

import h5py
import numpy as np
import pytest

from data_prep.examine import examined, format_examined
from ptdmpi.config import InputError
from ptdmpi.data.blocks import BLOCK_TOKENS, BLOCKS, BlockSums, block_sums
from ptdmpi.data.header import SUMMARY, listing, read_header
from ptdmpi.data.shard_writer import ShardWriter
from ptdmpi.data.shards import Dataset, verify
from ptdmpi.train.checks import checked
from ptdmpi.train.feed import open_datasets
from tests._runs import configuration

TOKENS = 3 * BLOCK_TOKENS + 100
LENGTH = 64


def _shard(folder, vocab_size=100, row_length=0):
    folder.mkdir()
    ids = np.random.default_rng(1).integers(0, vocab_size - 1, TOKENS)
    path = folder / "shard-00000.h5"
    attributes = {"vocab_size": vocab_size, "eod_id": 99, "row_length": row_length}
    with ShardWriter(path, "t", "0" * 64, **attributes) as writer:
        for start in range(0, TOKENS, 7001):  # pieces that end anywhere in a block
            piece = ids[start : start + 7001]
            ends = np.array([piece.size])
            if row_length:
                writer.write_row(piece, ends, np.arange(start, start + piece.size) % 2 > 0)
            else:
                writer.write(piece, ends)
    return path


def _flip(path, token: int) -> None:
    """Flip the lowest bit of a token: its id stays in the vocabulary."""
    (header,) = Dataset(path.parent).headers
    place = header.byte_offset + token * header.dtype.itemsize
    with path.open("r+b") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 1]))


@pytest.mark.parametrize("sizes", [[1], [BLOCK_TOKENS], [5, BLOCK_TOKENS, 3 * BLOCK_TOKENS - 5]])
def test_sums_do_not_depend_on_the_pieces(sizes):
    stream = np.random.default_rng(0).integers(0, 99, sum(sizes)).astype("<u2")
    whole, parts = BlockSums(), BlockSums()
    whole.add(stream)
    for piece in np.split(stream, np.cumsum(sizes)[:-1]):
        parts.add(piece)
    assert np.array_equal(whole.values(), parts.values())
    assert whole.values().size == -(-stream.size // BLOCK_TOKENS)


@pytest.mark.parametrize("use_mmap", [True, False])
@pytest.mark.parametrize("vocab_size", [100, 70_000], ids=["uint16", "uint32"])
def test_a_flipped_bit_is_found_where_it_is_read(tmp_path, use_mmap, vocab_size):
    path = _shard(tmp_path / "data", vocab_size)
    everything = np.arange(Dataset(path.parent).samples(LENGTH))
    expected = Dataset(path.parent).read(everything, LENGTH)
    assert np.array_equal(
        Dataset(path.parent, use_mmap, verified=True).read(everything, LENGTH), expected
    )
    for token in (0, BLOCK_TOKENS - 1, BLOCK_TOKENS, TOKENS - 50):
        _flip(path, token)
        data = Dataset(path.parent, use_mmap, verified=True)
        block = token // BLOCK_TOKENS
        with pytest.raises(
            InputError, match=rf"tokens {block * BLOCK_TOKENS} to \d+ have checksum"
        ):
            data.read(everything, LENGTH)
        other = np.array([(block + 1) % 3 * BLOCK_TOKENS // LENGTH + 1])
        assert np.array_equal(data.read(other, LENGTH), expected[other])  # another block
        assert Dataset(path.parent, use_mmap).read(everything, LENGTH).shape == expected.shape
        _flip(path, token)


def test_a_shard_without_sums_is_read_as_before(tmp_path):
    path = _shard(tmp_path / "data")
    with h5py.File(path, "r+") as file:
        del file[BLOCKS]
    assert block_sums(path, TOKENS) is None and verify(path) == []
    data = Dataset(path.parent, verified=True)
    assert data.read(np.array([3]), LENGTH).shape == (1, LENGTH + 1)


def test_damaged_sums_are_refused(tmp_path):
    path = _shard(tmp_path / "data")
    with h5py.File(path, "r+") as file:
        del file[BLOCKS]
        file[BLOCKS] = np.zeros(2, "<u4")
    with pytest.raises(InputError, match="token_blocks does not have 4 blocks"):
        Dataset(path.parent, verified=True).read(np.array([3]), LENGTH)


def test_a_start_may_verify_all_shards(tmp_path):
    path = _shard(tmp_path / "train")
    _flip(path, 5)
    for how in ("read", "off"):
        checked(configuration(tmp_path, {"data.verify": how}), 1)
    with pytest.raises(InputError, match=r"checksum .* recorded"):
        checked(configuration(tmp_path, {"data.verify": "start"}), 1)


def _opened(folder, how: str, **changes) -> Dataset:
    """Return the training dataset of a run with `data.verify` = `how`."""
    config = checked(configuration(folder, {"data.verify": how, **changes}), 1)
    return open_datasets(config)[0][0]


def _shift(path) -> None:
    """Move the end of a document by a token: the offsets still ascend."""
    with h5py.File(path, "r+") as file:
        file["documents"][1] += 1


def test_shifted_offsets_are_found_where_they_are_read(tmp_path):
    path = _shard(tmp_path / "train")
    assert verify(path) == []
    _shift(path)
    assert ["document offsets' checksum" in problem for problem in verify(path)] == [True]
    with pytest.raises(InputError, match=r"document offsets have checksum .* recorded crc32:"):
        _opened(tmp_path, "read").documents(0)
    assert _opened(tmp_path, "off").documents(0)[1] == 7002
    with pytest.raises(InputError, match="document offsets' checksum"):
        checked(configuration(tmp_path, {"data.verify": "start"}), 1)


def test_offsets_without_a_checksum_are_read_as_before(tmp_path):
    path = _shard(tmp_path / "data")
    assert examined(path)["notes"] == []
    with h5py.File(path, "r+") as file:
        del file.attrs["documents_checksum"]
    assert verify(path) == [] and len(Dataset(path.parent, verified=True).documents(0)) == 9
    result = examined(path.parent)
    assert "document offsets of 1 shard have no checksum" in format_examined(result)
    assert result["problems"] == []
    header = read_header(path)
    (path.parent / SUMMARY).write_text(json.dumps({"shards": listing([header])}))
    assert "documents_checksum" not in (path.parent / SUMMARY).read_text()
    assert examined(path.parent) == result


def test_a_flipped_weight_is_found_where_it_is_read(tmp_path):
    path = _shard(tmp_path / "train", row_length=LENGTH)
    changes = {"model.seq_length": LENGTH, "data.document_boundaries": True}
    assert _opened(tmp_path, "read", **changes).weights(0).tolist() == [0, 1] * (TOKENS // 2)
    with h5py.File(path, "r+") as file:
        file["weights"][7] = 0
    with pytest.raises(InputError, match=r"weights have checksum .* recorded crc32:"):
        _opened(tmp_path, "read", **changes).weights(0)
    assert _opened(tmp_path, "off", **changes).weights(0)[7] == 0


def test_each_part_of_a_shard_is_verified_once(tmp_path, monkeypatch):
    path = _shard(tmp_path / "data", row_length=LENGTH)
    sizes = []
    crc32 = zlib.crc32
    monkeypatch.setattr(zlib, "crc32", lambda data: sizes.append(data.nbytes) or crc32(data))
    data = Dataset(path.parent, verified=True)
    for _ in range(3):
        data.documents(0)
        data.weights(0)
    assert sizes == [9 * 8, TOKENS]
