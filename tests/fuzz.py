"""Damaged and random files for every reader of data: text or tokens, or the documented error.

    make fuzz                                     10^5 inputs
    python -m tests.fuzz --inputs 1000 --seed 7

Each input is a good file with bytes changed, cut out, put in or cut off, or random bytes. A reader
may raise InputError in one line, which names the file; any other exception is a finding, and so are
a crash of the process, tokens that are not bytes of the file, and ids outside the vocabulary.
"""

import argparse
import bz2
import gzip
import json
import lzma
import random
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import zstandard
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from data_prep.encode import EncodeOptions, read_pieces
from data_prep.megatron import MegatronIndex, export
from data_prep.sources import find_sources, read_tasks, split_sources
from ptdmpi.config import InputError
from ptdmpi.data.shard_writer import ShardWriter
from ptdmpi.data.shards import Dataset, map_documents, read_header, verify

INTERESTING = [0, 1, 0x7F, 0x80, 0xFF, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF, 1 << 63, (1 << 64) - 1]
CHANGES = st.lists(
    st.one_of(
        st.tuples(st.just("byte"), st.integers(0, 1 << 20), st.integers(0, 255)),
        st.tuples(st.just("word"), st.integers(0, 1 << 20), st.sampled_from(INTERESTING)),
        st.tuples(st.just("drop"), st.integers(0, 1 << 20), st.integers(1, 64)),
        st.tuples(st.just("insert"), st.integers(0, 1 << 20), st.binary(min_size=1, max_size=16)),
        st.tuples(st.just("cut"), st.integers(0, 1 << 20), st.just(0)),
    ),
    min_size=1,
    max_size=5,
)


def changed(content: bytes, changes: list, spread: Callable[[int], int] = lambda at: at) -> bytes:
    """The content with changes applied; `spread` maps positions to where damage is worth most."""
    data = bytearray(content)
    for kind, position, value in changes:
        at = spread(position) % max(1, len(data))
        match kind:
            case "byte":
                data[at : at + 1] = bytes([value])
            case "word":
                width = 8 if value > 0xFFFFFFFF else 4
                data[at : at + width] = value.to_bytes(width, "little")
            case "drop":
                del data[at : at + value]
            case "insert":
                data[at:at] = value
            case "cut":
                del data[at:]
    return bytes(data)


def documented(path: Path, read: Callable[[], None]) -> bool:
    """Whether a reader refused a file, and that in one line which names it."""
    try:
        read()
    except InputError as error:
        assert "\n" not in str(error) and str(path.parent) in str(error), str(error)
        return True
    return False


def _shard_bytes(folder: Path, vocab_size: int) -> bytes:
    path = folder / "good.h5"
    with ShardWriter(path, "t.json", "ab" * 32, vocab_size, 7) as writer:
        writer.write(np.arange(900) % 1000, np.array([100, 130, 900]))
    return path.read_bytes()


def fuzz_shards(inputs: int, folder: Path, number: int) -> tuple[int, int]:
    """Header, samples, documents, `verify`. Returns inputs tried, inputs refused."""
    good = [_shard_bytes(folder, size) for size in (1000, 100_000)]
    place = folder / "shards"
    place.mkdir()
    path = place / "x.h5"
    tried = [0, 0]

    def everything(content: bytes) -> None:
        header = read_header(path)
        end = header.byte_offset + header.tokens * header.dtype.itemsize
        assert 0 <= header.byte_offset <= end <= len(content)
        documents = map_documents(header)
        assert header.documents_byte_offset + documents.nbytes <= len(content)
        int(documents.sum())
        assert all("\n" not in problem for problem in verify(path))
        for use_mmap in (True, False):
            dataset = Dataset(place, use_mmap)
            count = dataset.samples(16)
            rows = dataset.read(np.arange(max(0, count - 50), count), 16)
            assert rows.max() < header.vocab_size
            at = header.byte_offset + (count - 1) * 16 * header.dtype.itemsize
            last = np.frombuffer(content, header.dtype, 17, at)
            assert (rows[-1] == last).all()

    @_many(inputs, number)
    @given(st.sampled_from(good), CHANGES, st.booleans())
    def one(content: bytes, changes: list, structure: bool) -> None:
        # the tokens begin at byte 4096; what is before and behind them is HDF5's and ours
        size = len(content) - 4096
        behind = 4096 + 900 * (2 if content is good[0] else 4)

        def important(at: int) -> int:
            return at % 2048 if at % 2 else behind + at % size

        damaged = changed(content, changes, important if structure else lambda at: at)
        path.write_bytes(damaged)
        tried[1] += documented(path, lambda: everything(damaged))
        tried[0] += 1

    one()
    return tried[0], tried[1]


TEXT = "".join(f"line {n} of ünïcode 日本 text\n" for n in range(40)).encode()
LINES = b"".join(
    json.dumps({"text": f"doc {n} " + "é\\ud83d\\ude42" * n, "id": n}).encode() + b"\n"
    for n in range(30)
)
COMPRESSIONS = {
    "": lambda data: data,
    ".gz": lambda data: gzip.compress(data[:300]) + gzip.compress(data[300:]),
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": zstandard.compress,
}


def fuzz_corpora(inputs: int, folder: Path, number: int) -> tuple[int, int]:
    """Text and lines, plain and compressed, whole and in slices."""
    good = {
        f"x{kind}{suffix}": compress(content)
        for kind, content in ((".txt", TEXT), (".jsonl", LINES))
        for suffix, compress in COMPRESSIONS.items()
    }
    place = folder / "corpora"
    place.mkdir()
    tried = [0, 0]

    def everything(path: Path, errors: str, slice_bytes: int) -> None:
        options = EncodeOptions("bytes", "text", errors, 0.5)
        for source in split_sources(find_sources([path]), slice_bytes):
            for task in read_tasks(0, [source], lambda size: None):
                for piece in read_pieces(task, options):
                    assert len(piece.text.encode()) >= 0

    @_many(inputs, number)
    @given(
        st.sampled_from(sorted(good)),
        st.one_of(CHANGES, st.binary(max_size=200)),
        st.sampled_from(["strict", "replace"]),
        st.integers(1, 3000),
    )
    def one(name: str, damage: list | bytes, errors: str, slice_bytes: int) -> None:
        path = place / name
        path.write_bytes(damage if isinstance(damage, bytes) else changed(good[name], damage))
        tried[1] += documented(path, lambda: everything(path, errors, slice_bytes))
        tried[0] += 1

    one()
    return tried[0], tried[1]


def fuzz_megatron(inputs: int, folder: Path, number: int) -> tuple[int, int]:
    """Index and tokens of Megatron."""
    place = folder / "megatron"
    place.mkdir()
    shards = folder / "to-export"
    shards.mkdir()
    with ShardWriter(shards / "a.h5", "t", "0" * 64, 1000, 7) as writer:
        tokens = np.arange(900) % 1000
        tokens[[99, 129, 899]] = 7
        writer.write(tokens, np.array([100, 130, 900]))
    export(shards, place / "good")
    index, data = ((place / f"good.{suffix}").read_bytes() for suffix in ("idx", "bin"))
    tried = [0, 0]

    def everything() -> None:
        megatron = MegatronIndex(place / "x")
        for block in megatron.blocks():
            assert block.tokens.size == block.lengths.sum()
            int(block.tokens.sum())

    @_many(inputs, number)
    @given(CHANGES, st.booleans())
    def one(changes: list, in_index: bool) -> None:
        (place / "x.idx").write_bytes(changed(index, changes) if in_index else index)
        (place / "x.bin").write_bytes(data if in_index else changed(data, changes))
        tried[1] += documented(place / "x.idx", everything)
        tried[0] += 1

    one()
    return tried[0], tried[1]


def _many(inputs: int, number: int) -> Callable:
    """So many random examples, without shrinking time, a database or limits per example."""

    def decorate(test: Callable) -> Callable:
        profile = settings(
            max_examples=inputs,
            deadline=None,
            database=None,
            derandomize=False,
            phases=(Phase.generate, Phase.shrink),
            suppress_health_check=list(HealthCheck),
        )
        return seed(number)(profile(test))

    return decorate


TARGETS = {"shards": fuzz_shards, "corpora": fuzz_corpora, "megatron": fuzz_megatron}
SHARES = {"shards": 0.4, "corpora": 0.4, "megatron": 0.2}


def run(name: str, inputs: int, number: int) -> tuple[int, int]:
    """Fuzz one kind of reader; inputs tried, inputs refused."""
    memory = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(dir=memory if memory.is_dir() else None))
    try:
        return TARGETS[name](inputs, folder, number)
    finally:
        shutil.rmtree(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("targets", nargs="*", help=f"of {', '.join(TARGETS)} [default: all]")
    parser.add_argument("--inputs", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32))
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}", flush=True)
    for name in arguments.targets or TARGETS:
        begun = time.perf_counter()
        tried, refused = run(name, int(arguments.inputs * SHARES[name]), arguments.seed)
        seconds = time.perf_counter() - begun
        print(f"{name:<9} {tried:>7,} inputs, {refused:,} refused, {seconds:.0f} s", flush=True)


if __name__ == "__main__":
    main()
