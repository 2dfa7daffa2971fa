"""The speed of reading, writing and tokenizing data, compared with the simplest code for the same
task.

    python -m benchmarks.data.reads [reads] [start] [write] [tokenize] [--folder DIR] [--rounds 5]
                              [--peers PYTHON] [--megatron DIR]

reads     reading samples of s = 1,024 tokens in the training order, compared with the expression
          `memmap[i * s : i * s + s + 1].astype(np.int64)` for the same number of random i (all
          files are in the page cache)
start     time and memory from the start of a process to its first batch, for 10^8 to 10^12 tokens
write     writing token ids to shards, compared with h5py's create_dataset(data=...)
tokenize  `ptdmpi-data tokenize`, compared with direct calls of the tokenizer and with other tools

The compared programs alternate, in changing order, and a ratio compares two times of the same
round. The output shows medians and, in brackets, the smallest and the greatest value.
"""

import argparse
import os
import tempfile
import time
from pathlib import Path
from unittest.mock import patch

import h5py
import numpy as np

from benchmarks.data.start import start
from benchmarks.data.tokenize import Peers, commands, learn, warm
from benchmarks.turns import Side, compare, show
from ptdmpi.data.batches import Prefetcher, TrainBatches
from ptdmpi.data.order import Part, SampleOrder
from ptdmpi.data.shard_writer import ShardWriter
from ptdmpi.data.shards import Dataset

PARTS = ("reads", "start", "write", "tokenize")
SEQ_LENGTH = 1024
VOCABULARY = {
    "tokenizer": "gpt2",
    "tokenizer_sha256": "0" * 64,
    "vocab_size": 50257,
    "eod_id": 50256,
}
WEIGHTS = ("0.4", "0.3", "0.2", "0.1")
DOCUMENT_TOKENS = 600
BLOCK_TOKENS = 1 << 20


def write_dataset(directory: Path, tokens: int, seed: int) -> Dataset:
    """Write a dataset of random tokens into `directory`, and return the opened dataset."""
    directory.mkdir(parents=True)
    chance = np.random.default_rng(seed)
    with ShardWriter(directory / "shard.h5", **VOCABULARY) as writer:
        for start in range(0, tokens, BLOCK_TOKENS):
            count = min(BLOCK_TOKENS, tokens - start)
            writer.write(chance.integers(0, 50256, count, np.uint16), np.array([count]))
    return Dataset(directory)


def timed_steps(batches: TrainBatches, samples: int, global_size: int) -> Side:
    """Return a function that reads the next `samples` samples of `batches`, step by step
    (`global_size` samples in a step), and returns samples/s."""
    places = iter(range(10**9))

    def side() -> float:
        steps = range(0, samples, global_size)
        begun = time.perf_counter()
        for _ in steps:
            for microbatch in batches.step(next(places)):
                last = (microbatch.inputs, microbatch.labels)
        rate = len(steps) * global_size / (time.perf_counter() - begun)
        assert all(ids.dtype == np.int64 and ids.shape[1] == SEQ_LENGTH for ids in last)
        return rate

    return side


def timed_prefetch(batches: TrainBatches, samples: int, global_size: int) -> Side:
    """Return a function that reads the next `samples` samples of `batches` through the prefetching
    thread, `global_size` samples in a step, and returns samples/s."""

    def side() -> float:
        steps = samples // global_size
        begun = time.perf_counter()
        for _ in Prefetcher(batches, 0, steps):
            pass
        return steps * global_size / (time.perf_counter() - begun)

    return side


def in_order(datasets: list[Dataset], global_size: int, micro_size: int) -> TrainBatches:
    """Return the batches from a mixture of datasets with the weights WEIGHTS, for a single data
    rank."""
    parts = [
        Part(dataset.samples(SEQ_LENGTH), weight)
        for dataset, weight in zip(datasets, WEIGHTS, strict=False)
    ]
    return TrainBatches(
        datasets,
        SampleOrder(parts, seed=1),
        SEQ_LENGTH,
        global_size=global_size,
        micro_size=micro_size,
        data_rank=0,
        data_size=1,
    )


def timed_slices(datasets: list[Dataset], picks: np.ndarray, chance: np.random.Generator) -> Side:
    """Return a function that reads samples as slices of memory-mapped files, and returns samples/s.
    `picks` are the numbers of the samples. For each sample, the generator `chance` chooses one of
    the `datasets`."""
    headers = [dataset.headers[0] for dataset in datasets]
    maps = [np.memmap(h.path, h.dtype, "r", h.byte_offset, (h.tokens,)) for h in headers]
    shares = np.array([float(weight) for weight in WEIGHTS[: len(datasets)]])
    files = chance.choice(len(datasets), len(picks), p=shares / shares.sum()).tolist()

    def side() -> float:
        starts = (picks * SEQ_LENGTH).tolist()
        begun = time.perf_counter()
        for file, first in zip(files, starts, strict=True):
            maps[file][first : first + SEQ_LENGTH + 1].astype(np.int64)
        return len(picks) / (time.perf_counter() - begun)

    return side


def timed_reads(dataset: Dataset, picks: np.ndarray, group: int) -> Side:
    """Return a function that reads the samples with the numbers `picks` from `dataset`, `group`
    samples per call, and returns samples/s."""

    def side() -> float:
        groups = [picks[n : n + group] for n in range(0, len(picks), group)]
        begun = time.perf_counter()
        for chosen in groups:
            rows = dataset.read(chosen, SEQ_LENGTH)
            assert rows[:, :-1].shape == rows[:, 1:].shape
        return len(picks) / (time.perf_counter() - begun)

    return side


def reads(folder: Path, rounds: int) -> None:
    """Measure reading samples from one dataset and from a mixture of four datasets, and print the
    rates."""
    everything = [write_dataset(folder / f"reads{n}", 50_000_000, n) for n in range(4)]
    count = everything[0].samples(SEQ_LENGTH)
    samples = 20_000
    chance = np.random.default_rng(0)
    picks = chance.integers(0, count, samples)
    for dataset in everything:
        for first in range(0, count, 1000):  # read the files into the page cache
            dataset.read(np.arange(first, min(first + 1000, count)), SEQ_LENGTH)
    for parts, title in ((1, "one dataset"), (4, "a mixture of four")):
        datasets = everything[:parts]
        sides: dict[str, Side] = {"np.memmap slice": timed_slices(datasets, picks, chance)}
        for size in (1, 8, 512):
            batches = in_order(datasets, size, 1)
            sides[f"training order, {size} sample(s) a step"] = timed_steps(batches, samples, size)
        batches = in_order(datasets, 512, 4)
        prefetched = timed_prefetch(batches, samples, 512)
        sides["training order, 512 samples a step, b = 4, prefetched"] = prefetched
        if parts == 1:
            for group in (1, 8, 64):
                name = f"Dataset.read of {group} random sample(s)"
                sides[name] = timed_reads(everything[0], picks, group)
        table = compare(sides, "np.memmap slice", rounds)
        show(f"reads of 1,024 tokens: {title}", "samples/s", table)


def write(folder: Path, rounds: int) -> None:
    """Measure writing token ids to shards, compared with h5py alone, and print the rates."""
    total = 200 * BLOCK_TOKENS
    tokens = np.random.default_rng(0).integers(0, 50256, total, np.uint16)
    ends = np.append(np.arange(DOCUMENT_TOKENS, BLOCK_TOKENS, DOCUMENT_TOKENS), BLOCK_TOKENS)
    path = folder / "written.h5"

    def ours(block: int, dtype: type, sync: bool = True) -> Side:
        ready = tokens.astype(dtype)
        inside = ends[ends <= block]
        if not inside.size or inside[-1] != block:
            inside = np.append(inside, block)

        def side() -> float:
            path.unlink(missing_ok=True)
            count = total // block if block == BLOCK_TOKENS else 50_000  # number of calls
            begun = time.perf_counter()
            with patch("os.fsync", os.fsync if sync else lambda file: None):
                with ShardWriter(path, **VOCABULARY) as writer:
                    for number in range(count):
                        writer.write(ready[number * block : (number + 1) * block], inside)
                return count * block / (time.perf_counter() - begun)

        return side

    def plain(sync: bool) -> Side:
        def side() -> float:
            path.unlink(missing_ok=True)
            begun = time.perf_counter()
            with h5py.File(path, "w") as file:
                file.create_dataset("tokens", data=tokens)
            if sync:
                with open(path, "rb") as stream:
                    os.fsync(stream.fileno())
            return total / (time.perf_counter() - begun)

        return side

    sides = {
        "h5py create_dataset(data=...)": plain(False),
        "h5py create_dataset(data=...), then fsync": plain(True),
        "ShardWriter, uint16, a million tokens a call": ours(BLOCK_TOKENS, np.uint16),
        "ShardWriter, uint16, a million tokens a call, no fsync": ours(
            BLOCK_TOKENS, np.uint16, sync=False
        ),
        "ShardWriter, int64, a million tokens a call": ours(BLOCK_TOKENS, np.int64),
        "ShardWriter, uint16, one document (600 tokens) a call": ours(DOCUMENT_TOKENS, np.uint16),
    }
    table = compare(sides, "h5py create_dataset(data=...)", rounds)
    show("write: ready token ids to a shard, checked, summed, synced", "tokens/s", table)
    path.unlink()


def tokenize(folder: Path, rounds: int, peers: Peers) -> None:
    """Measure `ptdmpi-data tokenize`, compared with direct calls of the tokenizer and with the
    tools of other projects (`peers`)."""
    tokenizer = learn(folder)
    warm(folder, tokenizer, rounds)
    commands(folder, tokenizer, min(rounds, 3), peers)


def main() -> None:
    """Run the measurements that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", help=f"of {' '.join(PARTS)} [default: all]")
    parser.add_argument("--folder", type=Path, help="the folder for the datasets")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peers", type=Path, help="a python that has the other tools")
    parser.add_argument("--megatron", type=Path, help="a checkout of Megatron-LM")
    arguments = parser.parse_args()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if arguments.folder is not None:
        arguments.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as place:
        for part in arguments.parts or PARTS:
            begun = time.perf_counter()
            if part == "tokenize":
                peers = Peers(arguments.peers, arguments.megatron)
                tokenize(Path(place), arguments.rounds, peers)
            else:
                measure = {"reads": reads, "start": start, "write": write}[part]
                measure(Path(place), arguments.rounds)
            print(f"  ({part}: {time.perf_counter() - begun:.0f} s)", flush=True)


if __name__ == "__main__":
    main()
