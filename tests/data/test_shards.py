"""The shard format: round trips, every kind of damage, whole files or none."""

import errno
import os
import shutil
import zlib

import h5py
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ptdmpi.config import InputError
from ptdmpi.data.header import read_header
from ptdmpi.data.shard_writer import ShardWriter
from ptdmpi.data.shards import Dataset, verify

VOCABULARY = {
    "tokenizer": "t.json",
    "tokenizer_sha256": "ab" * 32,
    "vocab_size": 1000,
    "eod_id": 999,
}


def write_shard(path, tokens, ends=None, **changes):
    with ShardWriter(path, **{**VOCABULARY, **changes}) as writer:
        writer.write(np.asarray(tokens), np.array([len(tokens)] if ends is None else ends))
    return path


@pytest.fixture
def shard(tmp_path):
    return write_shard(tmp_path / "shard.h5", np.arange(500), [100, 500])


@pytest.mark.parametrize(
    ("vocab_size", "dtype"), [(257, "<u2"), (65536, "<u2"), (65537, "<u4"), (10**6, "<u4")]
)
@pytest.mark.parametrize("use_mmap", [True, False])
def test_round_trip(tmp_path, vocab_size, dtype, use_mmap):
    tokens = np.random.default_rng(0).integers(0, vocab_size, 10_001)
    tokens[17] = vocab_size - 1
    with ShardWriter(tmp_path / "a.h5", "x", "y" * 64, vocab_size=vocab_size, eod_id=1) as writer:
        writer.write(tokens[:5], np.array([2]))
        writer.write(tokens[5:5], np.array([], dtype=int))
        writer.write(tokens[5:9000], np.array([1, 8000]))
        writer.write(tokens[9000:], np.array([1001]))
    dataset = Dataset(tmp_path, use_mmap)
    header = dataset.headers[0]
    assert (header.tokens, header.documents, header.dtype) == (10_001, 4, np.dtype(dtype))
    assert (dataset.tokenizer, dataset.tokenizer_sha256) == ("x", "y" * 64)
    assert (dataset.vocab_size, dataset.eod_id, dataset.token_count) == (vocab_size, 1, 10_001)
    assert dataset.documents(0).tolist() == [0, 2, 6, 8005, 10_001]
    assert dataset.documents(0).dtype == np.uint64
    rows = dataset.read(np.arange(1000), 10)
    assert rows.dtype == np.int64 and rows.shape == (1000, 11)
    assert all((rows[j] == tokens[10 * j : 10 * j + 11]).all() for j in range(1000))
    row = dataset.read(np.array([7]), 10)  # one alone
    assert row.dtype == np.int64 and (row == rows[7:8]).all()
    assert verify(header.path) == []
    with h5py.File(header.path) as file:  # what HDF5 itself reads
        assert (file["tokens"][:] == tokens).all()
        assert file["tokens"].chunks is None
    assert os.listdir(tmp_path) == ["a.h5"]


def test_same_tokens_give_the_same_bytes(tmp_path):
    tokens = np.arange(900)
    write_shard(tmp_path / "a.h5", tokens, [5, 900])
    with ShardWriter(tmp_path / "b.h5", **VOCABULARY) as writer:
        for start in range(0, 900, 100):
            ends = [5] if start == 0 else ([100] if start == 800 else [])
            writer.write(tokens[start : start + 100], np.array(ends, dtype=int))
    assert (tmp_path / "a.h5").read_bytes() == (tmp_path / "b.h5").read_bytes()


BLOCKS = (1, 32768, 32769, 700, 131072, 131073, 0, 98304, 4000, 262144, 17)


@pytest.mark.parametrize("vocab_size", [50257, 70000])
def test_the_same_bytes_whatever_the_blocks_and_their_types(tmp_path, vocab_size):
    total = sum(BLOCKS)
    tokens = np.random.default_rng(1).integers(0, vocab_size, total)
    tokens[-1] = vocab_size - 1
    ends = np.append(np.arange(50, total, 50), total)
    write_shard(tmp_path / "whole.h5", tokens, ends, vocab_size=vocab_size)
    header = read_header(tmp_path / "whole.h5")
    content = (tmp_path / "whole.h5").read_bytes()
    assert header.checksum == f"crc32:{zlib.crc32(tokens.astype(header.dtype)):08x}"
    types = [np.int64, np.uint64, np.dtype(">i4"), np.uint32]
    types += [np.uint16] if vocab_size == 50257 else []
    for shift in range(len(types)):
        path = tmp_path / f"{shift}.h5"
        done = 0
        with ShardWriter(path, **{**VOCABULARY, "vocab_size": vocab_size}) as writer:
            for number, count in enumerate(BLOCKS):
                block = tokens[done : done + count].astype(types[(number + shift) % len(types)])
                inside = ends[(ends > done) & (ends <= done + count)] - done
                writer.write(block, inside)
                block[:], inside[:] = 0, 0  # the caller's own again
                done += count
        assert path.read_bytes() == content
    for number, view in enumerate((tokens.astype(header.dtype).repeat(2)[::2], tokens[::-1][::-1])):
        write_shard(tmp_path / f"strided{number}.h5", view, ends, vocab_size=vocab_size)
        assert (tmp_path / f"strided{number}.h5").read_bytes() == content


@pytest.mark.parametrize("bad", [-1, 50257, 1 << 16, 1 << 40, -(1 << 63)])
@pytest.mark.parametrize("at", [0, 32767, 32768, 200_000])
def test_an_id_whose_low_bits_are_legal_is_refused(tmp_path, bad, at):
    tokens = np.zeros(200_001, np.int64)
    tokens[at] = bad
    with pytest.raises(InputError, match=f"token id {bad} is outside the vocabulary of 50257"):
        write_shard(tmp_path / "a.h5", tokens, vocab_size=50257)
    assert os.listdir(tmp_path) == []


def test_narrow_blocks_become_wide_tokens(tmp_path):
    tokens = np.arange(300_000).astype(np.uint8)
    write_shard(tmp_path / "a.h5", tokens, vocab_size=256, eod_id=0)
    assert (Dataset(tmp_path).read(np.array([0]), 299_999)[0] == tokens).all()


def test_samples_never_cross_shards(tmp_path):
    for name, first, length in (("a", 0, 25), ("b", 100, 3), ("c", 200, 31)):
        write_shard(tmp_path / f"{name}.h5", np.arange(first, first + length))
    dataset = Dataset(tmp_path)
    assert dataset.samples(10) == 2 + 0 + 3
    rows = dataset.read(np.array([4, 0, 2, 1, 3, 3]), 10)
    assert rows[:, 0].tolist() == [220, 0, 200, 10, 210, 210]
    assert (rows == rows[:, :1] + np.arange(11)).all()
    for outside in (-1, 5):
        with pytest.raises(IndexError):
            dataset.read(np.array([outside]), 10)


def test_shorter_than_one_sequence(shard):
    assert Dataset(shard.parent).samples(499) == 1
    with pytest.raises(
        InputError, match=r"shorter than one sequence.*500 tokens, seq_length 500 needs 501"
    ):
        Dataset(shard.parent).samples(500)


def overwrite(shard, position, value):
    header = read_header(shard)
    with open(shard, "r+b") as file:
        file.seek(header.byte_offset + position * 2)
        file.write(np.array([value], "<u2").tobytes())


@pytest.mark.parametrize("use_mmap", [True, False])
def test_id_outside_the_vocabulary(shard, use_mmap):
    overwrite(shard, 123, 1000)
    dataset = Dataset(shard.parent, use_mmap)
    dataset.read(np.array([0]), 100)
    for samples in ([1], [0, 1]):  # one alone goes another way
        with pytest.raises(
            InputError, match=r"shard\.h5: token 123 has id 1000, outside the vocabulary of 1000"
        ):
            dataset.read(np.array(samples), 100)
    assert any("token 123 has id 1000" in problem for problem in verify(shard))


def test_verify_finds_a_changed_token(shard):
    overwrite(shard, 7, 8)
    problems = verify(shard)
    assert len(problems) == 1 and "checksum" in problems[0]


def test_verify_finds_documents_out_of_order(tmp_path):
    shard = write_shard(tmp_path / "a.h5", np.arange(50), [10, 10, 50])
    assert any("document 1 does not end after its start" in problem for problem in verify(shard))


def change(shard, edit):
    with h5py.File(shard, "r+") as file:
        edit(file)


def replace_tokens(file, **options):
    del file["tokens"]
    file.create_dataset("tokens", **options)


DAMAGES = {
    "has no attribute 'eod_id'": lambda f: f.attrs.pop("eod_id"),
    "has no attribute 'checksum'": lambda f: f.attrs.pop("checksum"),
    "format_version 3": lambda f: f.attrs.update(format_version=3),
    "eod_id 1000 and vocab_size 1000": lambda f: f.attrs.update(eod_id=1000),
    "'vocab_size' is not an integer": lambda f: f.attrs.update(vocab_size="many"),
    "'eod_id' is not an integer": lambda f: f.attrs.update(eod_id=[5]),
    "'tokenizer' is not a text": lambda f: f.attrs.update(tokenizer=5),
    "(b'x'), not a text of variable length": lambda f: f.attrs.update(tokenizer=np.bytes_("x")),
    "no dataset 'documents'": lambda f: f.pop("documents"),
    "no dataset 'tokens'": lambda f: f.pop("tokens"),
    "type <i8": lambda f: replace_tokens(f, data=np.arange(500)),
    "type >u2": lambda f: replace_tokens(f, data=np.arange(500, dtype=">u2")),
    "one dim": lambda f: replace_tokens(f, data=np.ones((500, 1), "<u2")),
    "not empty": lambda f: replace_tokens(f, data=np.ones(0, "<u2")),
    "contiguous": lambda f: replace_tokens(f, data=np.ones(500, "<u2"), chunks=(100,)),
    "contiguous, uncompressed": lambda f: replace_tokens(
        f, data=np.ones(500, "<u2"), compression="gzip"
    ),
    "run from 0 to the number of tokens, 499": lambda f: replace_tokens(
        f, data=np.ones(499, "<u2")
    ),
}


@pytest.mark.parametrize("message", DAMAGES)
def test_damaged_metadata(shard, message):
    change(shard, DAMAGES[message])
    with pytest.raises(InputError) as caught:
        Dataset(shard.parent)
    assert message in str(caught.value) and str(shard) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert verify(shard) == [str(caught.value)]


@pytest.mark.parametrize("size", [0, 1 << 40, (1 << 64) - 1, (1 << 64) - 16])
def test_a_damaged_heap_of_texts_is_not_given_to_hdf5(shard, size):
    """Which would read it for ever."""
    content = bytearray(shard.read_bytes())
    at = content.find(b"GCOL") + 16  # the first object; 0: free space without a byte
    content[at + 8 : at + 16] = size.to_bytes(8, "little")
    if not size:
        content[at : at + 2] = b"\0\0"
    shard.write_bytes(content)
    with pytest.raises(InputError, match=r"shard\.h5: .*damaged texts"):
        read_header(shard)


def test_a_text_whose_type_is_damaged_is_not_given_to_hdf5(shard):
    """Which would crash: sequences of variable length in place of a text of such a length."""
    content = bytearray(shard.read_bytes())
    name = b"tokenizer_sha256\0"
    at = content.find(b"\x19\x01", content.find(name) + len(name))  # class 9, of texts
    assert 0 < at - content.find(name) < 30
    content[at + 1] = 0x86
    shard.write_bytes(content)
    with pytest.raises(InputError, match="attribute 'tokenizer_sha256' is not a text"):
        read_header(shard)


@pytest.mark.parametrize("mapped", [True, False])
def test_a_shard_cut_while_it_is_open(shard, mapped):
    """A line that names it, where the map alone would end the process by a bus error."""
    dataset = Dataset(shard.parent, use_mmap=mapped)
    dataset.read(np.array([0]), 8)
    os.truncate(shard, dataset.headers[0].byte_offset + 2)
    with pytest.raises(InputError, match=rf"shard {shard}: was truncated while it was read"):
        dataset.read(np.array([1]), 8)


def test_offsets_of_documents_that_were_cut_are_refused(shard):
    dataset = Dataset(shard.parent)
    os.truncate(shard, dataset.headers[0].documents_byte_offset + 2)
    with pytest.raises(InputError, match=rf"shard {shard}: cannot be mapped: mmap length"):
        dataset.documents(0)


@pytest.mark.parametrize("keep", [0, 1, 100, 5000, 0.5, 0.99])
def test_truncated_shard(shard, keep):
    size = shard.stat().st_size
    os.truncate(shard, int(keep if keep >= 1 else keep * size))
    with pytest.raises(InputError, match=r"shard\.h5") as caught:
        read_header(shard)
    assert "\n" not in str(caught.value)


def test_missing_shard_directory_and_foreign_files(tmp_path):
    with pytest.raises(InputError, match="no such file"):
        read_header(tmp_path / "none.h5")
    with pytest.raises(InputError, match="no such directory"):
        Dataset(tmp_path / "none")
    with pytest.raises(InputError, match=r"no \*\.h5 file"):
        Dataset(tmp_path)
    (tmp_path / "a.h5").write_text("no HDF5")
    with pytest.raises(InputError, match=r"a\.h5"):
        Dataset(tmp_path)


def test_unfinished_directory_is_refused(shard):
    (shard.parent / ".unfinished").mkdir()
    with pytest.raises(InputError, match="unfinished"):
        Dataset(shard.parent)


@pytest.mark.parametrize(
    "changes", [{"vocab_size": 1001}, {"eod_id": 998}, {"tokenizer_sha256": "cd" * 32}]
)
def test_shards_of_different_tokenizers(shard, changes):
    write_shard(shard.with_name("z.h5"), np.arange(10), **changes)
    with pytest.raises(InputError, match=f"z.h5 has {next(iter(changes))}"):
        Dataset(shard.parent)


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.lists(st.tuples(st.integers(0, 45000), st.integers(0, 255)), min_size=1, max_size=6))
def test_flipped_bytes_give_only_the_documented_error(shard, flips):
    content = bytearray(shard.read_bytes())
    for position, value in flips:
        content[position % len(content)] = value
    broken = shard.with_name("broken")
    broken.write_bytes(content)
    try:
        header = read_header(broken)
    except InputError as error:
        assert "\n" not in str(error)
    else:
        assert header.byte_offset + header.tokens * header.dtype.itemsize <= len(content)


def test_exception_leaves_nothing(tmp_path):
    with pytest.raises(KeyError), ShardWriter(tmp_path / "a.h5", **VOCABULARY) as writer:
        writer.write(np.arange(10), np.array([10]))
        raise KeyError
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("bad", [-1, 1000])
def test_writer_refuses_ids_outside_the_vocabulary(tmp_path, bad):
    with pytest.raises(InputError, match=f"token id {bad} is outside"):
        write_shard(tmp_path / "a.h5", [1, bad, 2])
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(("tokens", "ends"), [([], []), ([1, 2, 3], [2])])
def test_writer_refuses_an_empty_shard_and_an_open_document(tmp_path, tokens, ends):
    with pytest.raises(InputError, match="no tokens, or no end"):
        write_shard(tmp_path / "a.h5", np.array(tokens, dtype=int), np.array(ends, dtype=int))
    assert os.listdir(tmp_path) == []


def test_failing_sync_leaves_nothing(tmp_path, monkeypatch):
    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(InputError, match="No space left"):
        write_shard(tmp_path / "a.h5", np.arange(10))
    assert os.listdir(tmp_path) == []


def test_unwritable_place(tmp_path):
    with pytest.raises(InputError, match="cannot be written"):
        ShardWriter(tmp_path / "none" / "a.h5", **VOCABULARY)


def test_opening_more_shards_than_are_kept_open(tmp_path, monkeypatch):
    monkeypatch.setattr("ptdmpi.data.shards._OPEN_SHARDS", 3)
    write_shard(tmp_path / "s0.h5", np.arange(21))
    for number in range(1, 8):
        shutil.copy(tmp_path / "s0.h5", tmp_path / f"s{number}.h5")
    before = len(os.listdir("/proc/self/fd"))
    for use_mmap in (True, False):
        dataset = Dataset(tmp_path, use_mmap)
        rows = dataset.read(np.arange(16), 10)
        assert (rows[:, 0] == np.tile([0, 10], 8)).all()
        assert len(os.listdir("/proc/self/fd")) <= before + 3
        del dataset
    assert len(os.listdir("/proc/self/fd")) == before
