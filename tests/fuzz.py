"""Damaged and random files for every reader of data: text or tokens, or the documented error.

    make fuzz                                     10^5 inputs, on all cores
    python -m tests.fuzz shards --inputs 1000 --seed 7

Each input is a good file with bytes changed, cut out, put in or cut off, or random bytes. A reader
may raise InputError in one line, which names the file; any other exception is a finding, and so are
a crash of the process, tokens that are not bytes of the file, and ids outside the vocabulary. An
input is a function of seed, target and its number alone: a finding says how to make it again.
"""

import argparse
import bz2
import gzip
import json
import lzma
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import zstandard

from data_prep.encode import EncodeOptions, read_pieces
from data_prep.megatron import MegatronIndex, export
from data_prep.sources import find_sources, read_tasks, split_sources
from ptdmpi.config import InputError
from ptdmpi.data.header import SUMMARY, listing, read_header
from ptdmpi.data.shard_writer import ShardWriter
from ptdmpi.data.shards import Dataset, map_documents, map_weights, verify

INTERESTING = [0, 1, 0x7F, 0x80, 0xFF, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF, 1 << 63, (1 << 64) - 1]
KINDS = ("byte", "word", "drop", "insert", "cut")
PIECE_INPUTS = 1000  # that a process is given at a time
PIECE_SECONDS = 600  # a hundred times what they take

TryOne = Callable[[random.Random], bool]  # makes an input and has it read; whether it was refused


def changed(
    content: bytes, chance: random.Random, spread: Callable[[int], int] = lambda at: at
) -> bytes:
    """The content with some changes; `spread` maps positions to where damage is worth most."""
    data = bytearray(content)
    for _ in range(chance.randint(1, 5)):
        at = spread(chance.randrange(1 << 20)) % max(1, len(data))
        match chance.choice(KINDS):
            case "byte":
                data[at : at + 1] = bytes([chance.randrange(256)])
            case "word":
                value = chance.choice(INTERESTING)
                width = 8 if value > 0xFFFFFFFF else 4
                data[at : at + width] = value.to_bytes(width, "little")
            case "drop":
                del data[at : at + chance.randint(1, 64)]
            case "insert":
                data[at:at] = chance.randbytes(chance.randint(1, 16))
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
    with ShardWriter(path, "t.json", "ab" * 32, vocab_size=vocab_size, eod_id=7) as writer:
        writer.write(np.arange(900) % 1000, np.array([100, 130, 900]))
    return path.read_bytes()


def _weighted_bytes(folder: Path) -> bytes:
    """A shard of rows, whose tokens have weights."""
    path = folder / "weighted.h5"
    with ShardWriter(path, "t.json", "ab" * 32, vocab_size=1000, eod_id=7, row_length=16) as writer:
        writer.write_row(np.arange(97), np.array([90, 97]), np.arange(97) % 2 > 0)
    return path.read_bytes()


def fuzz_shards(folder: Path) -> TryOne:
    """Header, samples, documents, `verify`."""
    good = [*(_shard_bytes(folder, size) for size in (1000, 100_000)), _weighted_bytes(folder)]
    place = folder / "shards"
    place.mkdir()
    path = place / "x.h5"

    def everything(content: bytes) -> None:
        header = read_header(path)
        end = header.byte_offset + header.tokens * header.dtype.itemsize
        assert 0 <= header.byte_offset <= end <= len(content)
        documents = map_documents(header)
        assert header.documents_byte_offset + documents.nbytes <= len(content)
        int(documents.sum())
        if header.row_length:
            assert header.weights_byte_offset + header.tokens <= len(content)
            int(map_weights(header).sum())
        assert all("\n" not in problem for problem in verify(path))
        for use_mmap in (True, False):
            dataset = Dataset(place, use_mmap)
            count = dataset.samples(16)
            rows = dataset.read(np.arange(max(0, count - 50), count), 16)
            assert rows.max() < header.vocab_size
            at = header.byte_offset + (count - 1) * 16 * header.dtype.itemsize
            last = np.frombuffer(content, header.dtype, 17, at)
            assert (rows[-1] == last).all()
            assert (dataset.read(np.array([count - 1]), 16) == rows[-1:]).all()

    structures = {content: _structures(path, content) for content in good}

    def try_one(chance: random.Random) -> bool:
        content = chance.choice(good)
        worth = structures[content]
        spread = (lambda at: worth[at % len(worth)]) if chance.random() < 0.5 else lambda at: at
        damaged = changed(content, chance, spread)
        path.write_bytes(damaged)
        return documented(path, lambda: everything(damaged))

    return try_one


def _structures(path: Path, content: bytes) -> list[int]:
    """Where HDF5's own bytes and the documents are: not the tokens, nor the empty rest of pages."""
    path.write_bytes(content)
    header = read_header(path)
    tokens = range(header.byte_offset, header.byte_offset + header.tokens * header.dtype.itemsize)
    used = {at for at, byte in enumerate(content) if byte and at not in tokens}
    return sorted({at + near for at in used for near in range(-8, 9)} & set(range(len(content))))


def fuzz_lists(folder: Path) -> TryOne:
    """The list beside the shards: right, refused, or found to differ from a shard when that is
    read."""
    place = folder / "lists"
    place.mkdir()
    for name in "abc":
        (place / f"{name}.h5").write_bytes(_shard_bytes(folder, 1000))
    headers = [read_header(path) for path in sorted(place.glob("*.h5"))]
    path = place / SUMMARY
    good = json.dumps({"shards": listing(headers)}, indent=1).encode()

    def everything() -> None:
        dataset = Dataset(place)
        for shard in range(3):
            assert (dataset.shard_tokens(shard)[:900] == np.arange(900)).all()
            assert dataset.documents(shard)[-1] == 900
        assert dataset.samples(16) == 3 * (899 // 16)

    def try_one(chance: random.Random) -> bool:
        path.write_bytes(changed(good, chance))
        return documented(path, everything)

    return try_one


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


def fuzz_corpora(folder: Path) -> TryOne:
    """Text and lines, plain and compressed, whole and in slices."""
    good = {
        f"x{kind}{suffix}": compress(content)
        for kind, content in ((".txt", TEXT), (".jsonl", LINES))
        for suffix, compress in COMPRESSIONS.items()
    }
    place = folder / "corpora"
    place.mkdir()

    def everything(path: Path, errors: str, slice_bytes: int) -> None:
        options = EncodeOptions("bytes", "text", errors, 0.5)
        for source in split_sources(find_sources([path]), slice_bytes):
            for task in read_tasks(0, [source], lambda size: None):
                for piece in read_pieces(task, options):
                    assert len(piece.text.encode()) >= 0

    def try_one(chance: random.Random) -> bool:
        name = chance.choice(sorted(good))
        path = place / name
        random_bytes = chance.random() < 0.2
        path.write_bytes(
            chance.randbytes(chance.randrange(200)) if random_bytes else changed(good[name], chance)
        )
        errors, slice_bytes = chance.choice(["strict", "replace"]), chance.randint(1, 3000)
        return documented(path, lambda: everything(path, errors, slice_bytes))

    return try_one


def fuzz_megatron(folder: Path) -> TryOne:
    """Index and tokens of Megatron."""
    place, shards = folder / "megatron", folder / "to-export"
    place.mkdir()
    shards.mkdir()
    with ShardWriter(shards / "a.h5", "t", "0" * 64, vocab_size=1000, eod_id=7) as writer:
        tokens = np.arange(900) % 1000
        tokens[[99, 129, 899]] = 7
        writer.write(tokens, np.array([100, 130, 900]))
    export(shards, place / "good")
    index, data = ((place / f"good.{suffix}").read_bytes() for suffix in ("idx", "bin"))

    def everything() -> None:
        for block in MegatronIndex(place / "x").blocks():
            assert block.tokens.size == block.lengths.sum()
            int(block.tokens.sum())

    def try_one(chance: random.Random) -> bool:
        in_index = chance.random() < 0.5
        (place / "x.idx").write_bytes(changed(index, chance) if in_index else index)
        (place / "x.bin").write_bytes(data if in_index else changed(data, chance))
        return documented(place / "x.idx", everything)

    return try_one


TARGETS = {
    "shards": fuzz_shards,
    "lists": fuzz_lists,
    "corpora": fuzz_corpora,
    "megatron": fuzz_megatron,
}
SHARES = {"shards": 0.4, "lists": 0.1, "corpora": 0.35, "megatron": 0.15}


def run(name: str, numbers: range, seed: int) -> int:
    """Have the inputs of these numbers read by one kind of reader; how many were refused."""
    memory = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(dir=memory if memory.is_dir() else None))
    try:
        try_one, refused = TARGETS[name](folder), 0
        for number in numbers:
            try:
                refused += try_one(random.Random(f"{seed} {name} {number}"))
            except BaseException as error:
                raise AssertionError(f"a finding: {_command(name, number, 1, seed)}") from error
        return refused
    finally:
        shutil.rmtree(folder)


def _run_piece(name: str, numbers: range, seed: int) -> int:
    """As `run`, in a process that ends where a reader does not: nothing else stops a C library."""
    signal.alarm(PIECE_SECONDS)
    try:
        return run(name, numbers, seed)
    finally:
        signal.alarm(0)


def _command(name: str, first: int, inputs: int, seed: int) -> str:
    return f"python -m tests.fuzz {name} --first {first} --inputs {inputs} --seed {seed}"


def main() -> None:
    """Give damaged inputs to one target or to all, on all cores."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("target", nargs="?", choices=TARGETS, help="[default: all]")
    parser.add_argument("--inputs", type=int, default=100_000)
    parser.add_argument("--first", type=int, default=0, help="number of the first input")
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32))
    arguments = parser.parse_args()
    seed, begun = arguments.seed, time.perf_counter()
    print(f"seed {seed}", flush=True)
    shares = SHARES if arguments.target is None else {arguments.target: 1.0}
    pieces: dict[str, list[tuple[range, Future[int]]]] = {}
    with ProcessPoolExecutor(len(os.sched_getaffinity(0)), get_context("spawn")) as pool:
        for name, share in shares.items():
            end = arguments.first + round(arguments.inputs * share)
            starts = range(arguments.first, end, PIECE_INPUTS)
            numbers = [range(at, min(at + PIECE_INPUTS, end)) for at in starts]
            pieces[name] = [
                (piece, pool.submit(_run_piece, name, piece, seed)) for piece in numbers
            ]
        for name, of in pieces.items():
            refused = 0
            for piece, answer in of:
                try:
                    refused += answer.result()
                except BrokenProcessPool:
                    sys.exit(
                        "a process crashed or did not end, perhaps in one of these or of the next "
                        f"{PIECE_INPUTS} inputs: {_command(name, piece.start, len(piece), seed)}"
                    )
            tried, seconds = sum(len(piece) for piece, _ in of), time.perf_counter() - begun
            print(f"{name:<9} {tried:>7,} inputs, {refused:,} refused, {seconds:.0f} s", flush=True)


if __name__ == "__main__":
    main()
