"""How fast data comes, beside the least that it could cost.

    python -m benchmarks.data [reads] [start] [write] [tokenize] [--folder DIR] [--rounds 5]
                              [--tokenizer FILE --text FILE]

reads     samples of 1,024 tokens in the training order, ready as int64 inputs and labels, beside
          `memmap[i * s : i * s + s + 1].astype(np.int64)` of as many random i; warm page cache
start     time and memory from the start of a process to its first batch: 10^8 to 10^12 tokens
write     ready token ids to shards, beside h5py's create_dataset(data=...)
tokenize  `ptdmpi-data tokenize` in one process, beside the bare calls of the tokenizer

All sides run in turn in one process, in changing order; a ratio is that of one round. Medians and,
in brackets, the least and the greatest.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np

from ptdmpi.data.batches import Prefetcher, TrainBatches
from ptdmpi.data.order import Part, SampleOrder
from ptdmpi.data.shard_writer import ShardWriter
from ptdmpi.data.shards import Dataset

SEQ_LENGTH = 1024
VOCABULARY = ("gpt2", "0" * 64, 50257, 50256)
WEIGHTS = ("0.4", "0.3", "0.2", "0.1")
DOCUMENT_TOKENS = 600
BLOCK_TOKENS = 1 << 20
SHARD_TOKENS = 1 << 28

Side = Callable[[], float]  # returns how many things it did per second


def compare(sides: dict[str, Side], plain: str, rounds: int) -> dict[str, dict[str, float]]:
    """Rates of all sides and their ratios to the plain one, taken in turn."""
    rates: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(rounds + 1):
        names = list(sides)[:: 1 if number % 2 else -1]
        for name in names:
            rate = sides[name]()
            if number:  # the round before the first warms up
                rates[name].append(rate)
    table = {}
    for name, mine in rates.items():
        ratios = [a / b for a, b in zip(mine, rates[plain], strict=True)]
        table[name] = {
            "per_s": statistics.median(mine),
            "ratio": statistics.median(ratios),
            "least": min(ratios),
            "greatest": max(ratios),
        }
    return table


def show(title: str, unit: str, table: dict[str, dict[str, float]]) -> None:
    print(f"\n{title}")
    for name, row in table.items():
        print(
            f"  {name:<58} {row['per_s']:>14,.0f} {unit}  "
            f"{row['ratio']:.2f} [{row['least']:.2f}, {row['greatest']:.2f}]"
        )


def write_dataset(directory: Path, tokens: int, seed: int) -> Dataset:
    directory.mkdir(parents=True)
    chance = np.random.default_rng(seed)
    with ShardWriter(directory / "shard.h5", *VOCABULARY) as writer:
        for start in range(0, tokens, BLOCK_TOKENS):
            count = min(BLOCK_TOKENS, tokens - start)
            writer.write(chance.integers(0, 50256, count, np.uint16), np.array([count]))
    return Dataset(directory)


def timed_steps(batches: TrainBatches, samples: int, global_size: int) -> Side:
    places = iter(range(10**9))

    def side() -> float:
        steps = range(0, samples, global_size)
        begun = time.perf_counter()
        for _ in steps:
            for microbatch in batches.step(next(places)):
                assert microbatch.inputs.dtype == microbatch.labels.dtype == np.int64
        return len(steps) * global_size / (time.perf_counter() - begun)

    return side


def timed_prefetch(batches: TrainBatches, samples: int, global_size: int) -> Side:
    def side() -> float:
        steps = samples // global_size
        begun = time.perf_counter()
        for _ in Prefetcher(batches, 0, steps):
            pass
        return steps * global_size / (time.perf_counter() - begun)

    return side


def reads(folder: Path, rounds: int) -> dict[str, dict[str, float]]:
    datasets = [write_dataset(folder / f"reads{n}", 50_000_000, n) for n in range(4)]
    header = datasets[0].headers[0]
    plain = np.memmap(header.path, header.dtype, "r", header.byte_offset, (header.tokens,))
    count, samples = datasets[0].samples(SEQ_LENGTH), 20_000
    picks = np.random.default_rng(0).integers(0, count, samples)
    for dataset in datasets:
        dataset.read(np.arange(count), SEQ_LENGTH)  # into the page cache

    def bare() -> float:
        starts = (picks * SEQ_LENGTH).tolist()
        begun = time.perf_counter()
        for start in starts:
            plain[start : start + SEQ_LENGTH + 1].astype(np.int64)
        return samples / (time.perf_counter() - begun)

    def by_number(group: int) -> Side:
        def side() -> float:
            groups = [picks[n : n + group] for n in range(0, samples, group)]
            begun = time.perf_counter()
            for chosen in groups:
                rows = datasets[0].read(chosen, SEQ_LENGTH)
                assert rows[:, :-1].shape == rows[:, 1:].shape
            return samples / (time.perf_counter() - begun)

        return side

    sides: dict[str, Side] = {"np.memmap slice": bare}
    for parts in (1, 4):
        what = "a mixture of four" if parts == 4 else "one dataset"
        order = SampleOrder([Part(count, w) for w in WEIGHTS[:parts]], seed=1)
        for size in (1, 8, 512):
            batches = TrainBatches(datasets[:parts], order, SEQ_LENGTH, size, 1, 0, 1)
            name = f"training order, {what}, {size} sample(s) a step"
            sides[name] = timed_steps(batches, samples, size)
        batches = TrainBatches(datasets[:parts], order, SEQ_LENGTH, 512, 4, 0, 1)
        sides[f"training order, {what}, 512 a step, prefetched"] = timed_prefetch(
            batches, samples, 512
        )
    for group in (1, 8, 64):
        sides[f"Dataset.read of {group} random sample(s)"] = by_number(group)
    table = compare(sides, "np.memmap slice", rounds)
    show("reads: samples of 1,024 tokens", "samples/s", table)
    return table


FIRST_BATCH = """
import json, sys
import numpy as np
from ptdmpi.data.batches import TrainBatches
from ptdmpi.data.order import Part, SampleOrder
from ptdmpi.data.shards import Dataset
dataset = Dataset(sys.argv[1])
samples = dataset.samples(1024)
order = SampleOrder([Part(samples, "1")], seed=1)
step = int(float(sys.argv[2]) * samples) // 8
microbatch = TrainBatches([dataset], order, 1024, 8, 1, 0, 1).step(step)[0]
assert microbatch.inputs.shape == (1, 1024)
status = dict(line.split(":", 1) for line in open("/proc/self/status") if ":" in line)
print(json.dumps({name: int(status[name].split()[0]) // 1024 for name in ("VmHWM", "RssAnon")}))
"""
NOTHING = "import h5py, numpy"


def sparse_dataset(directory: Path, tokens: int, shard_tokens: int) -> Path:
    """Shards whose tokens take no place on the disk: all are 0."""
    directory.mkdir(parents=True)
    names = ("tokenizer", "tokenizer_sha256", "vocab_size", "eod_id")
    for number, start in enumerate(range(0, tokens, shard_tokens)):
        count = min(shard_tokens, tokens - start)
        with h5py.File(directory / f"shard-{number:05d}.h5", "w") as file:
            plan = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
            plan.set_layout(h5py.h5d.CONTIGUOUS)
            plan.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
            plan.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
            kind, space = h5py.h5t.py_create(np.dtype("<u2")), h5py.h5s.create_simple((count,))
            h5py.h5d.create(file.id, b"tokens", kind, space, plan)
            file.create_dataset("documents", data=np.array([0, count], "<u8"))
            file.attrs.update(zip(names, VOCABULARY, strict=True))
            file.attrs.update(format_version=1, checksum="crc32:00000000")
    return directory


def start(folder: Path, rounds: int) -> dict[str, dict[str, float]]:
    cases = {
        "10^8 tokens, 1 shard": (10**8, 10**8),
        "10^10 tokens, 1 shard": (10**10, 10**10),
        "10^12 tokens, 1 shard": (10**12, 10**12),
        "10^10 tokens, 38 shards of 2^28": (10**10, SHARD_TOKENS),
        "10^12 tokens, 3,726 shards of 2^28": (10**12, SHARD_TOKENS),
    }
    commands: dict[str, list[str]] = {"importing h5py and numpy": ["-c", NOTHING]}
    for name, (tokens, shard_tokens) in cases.items():
        place = sparse_dataset(folder / f"start{len(commands)}", tokens, shard_tokens)
        commands[name] = ["-c", FIRST_BATCH, str(place), "0"]
        if shard_tokens == tokens:
            commands[f"{name}, epoch 164"] = [*commands[name][:-1], "163.5"]
    times: dict[str, list[float]] = {name: [] for name in commands}
    memory = {}
    for number in range(rounds + 1):
        for name, arguments in commands.items():
            begun = time.perf_counter()
            done = subprocess.run(
                [sys.executable, *arguments], capture_output=True, check=True, timeout=120
            )
            if number:
                times[name].append(time.perf_counter() - begun)
            memory[name] = json.loads(done.stdout) if done.stdout else {}
    print("\nstart: process start to first batch")
    for name, measured in times.items():
        sizes = "  ".join(f"{key} {value} MiB" for key, value in memory[name].items())
        middle = statistics.median(measured)
        print(f"  {name:<58} {middle:.2f} s [{min(measured):.2f}, {max(measured):.2f}]  {sizes}")
    return {name: {"s": statistics.median(times[name]), **memory[name]} for name in commands}


def write(folder: Path, rounds: int) -> dict[str, dict[str, float]]:
    total = 200 * BLOCK_TOKENS
    tokens = np.random.default_rng(0).integers(0, 50256, total, np.uint16)
    ends = np.append(np.arange(DOCUMENT_TOKENS, BLOCK_TOKENS, DOCUMENT_TOKENS), BLOCK_TOKENS)
    path = folder / "written.h5"

    def ours(block: int, dtype: type) -> Side:
        ready = tokens.astype(dtype)
        inside = ends[ends < block] if block < BLOCK_TOKENS else ends
        inside = inside if inside.size and inside[-1] == block else np.append(inside, block)

        def side() -> float:
            path.unlink(missing_ok=True)
            count = total // block if block == BLOCK_TOKENS else 50_000
            begun = time.perf_counter()
            with ShardWriter(path, *VOCABULARY) as writer:
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
        "ShardWriter, int64, a million tokens a call": ours(BLOCK_TOKENS, np.int64),
        "ShardWriter, uint16, one document (600 tokens) a call": ours(DOCUMENT_TOKENS, np.uint16),
    }
    table = compare(sides, "h5py create_dataset(data=...)", rounds)
    show("write: ready token ids to a shard, checked, summed, synced", "tokens/s", table)
    path.unlink()
    return table


def tokenize(folder: Path, rounds: int, tokenizer: Path, text: Path) -> dict[str, dict[str, float]]:
    import tokenizers

    from data_prep.corpus import OutputOptions, make_shards
    from data_prep.encode import EncodeOptions
    from data_prep.launch import Ranks
    from data_prep.text_corpus import TextCorpus, TextOptions
    from data_prep.vocabulary import load_tokenizer

    bare_tokenizer = tokenizers.Tokenizer.from_file(str(tokenizer))
    bare_tokenizer.encode_special_tokens = True
    lines = text.read_text(encoding="utf-8").splitlines()
    texts = [json.loads(line)["text"] for line in lines if line.strip()]
    groups = [texts[n : n + 256] for n in range(0, len(texts), 256)]
    tokens = sum(
        len(encoding.ids) + 1
        for group in groups
        for encoding in bare_tokenizer.encode_batch_fast(group, add_special_tokens=False)
    )

    def bare() -> float:
        begun = time.perf_counter()
        for group in groups:
            bare_tokenizer.encode_batch_fast(group, add_special_tokens=False)
        return tokens / (time.perf_counter() - begun)

    def ours() -> float:
        output = OutputOptions(folder / "tokenized", force=True, quiet=True)
        encode = EncodeOptions(str(tokenizer), "text", "strict", 0.0)
        options = TextOptions((str(text),), encode, workers=1)
        begun = time.perf_counter()
        ranks = Ranks(0, 1, lambda value: [value])
        table = make_shards(lambda: TextCorpus(options, output), output, ranks)
        elapsed = time.perf_counter() - begun
        assert table["train_tokens"] == tokens
        return tokens / elapsed

    load_tokenizer(str(tokenizer))
    sides = {"bare encode_batch_fast": bare, "ptdmpi-data tokenize --workers 1": ours}
    table = compare(sides, "bare encode_batch_fast", rounds)
    show(f"tokenize: {len(texts):,} documents, {tokens:,} tokens, one core", "tokens/s", table)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", help="reads start write tokenize [the first 3]")
    parser.add_argument("--folder", type=Path, help="where the data sets are made")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokenizer", type=Path, help="tokenizer.json, for tokenize")
    parser.add_argument("--text", type=Path, help=".jsonl, for tokenize")
    arguments = parser.parse_args()
    parts = arguments.parts or ["reads", "start", "write"]
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    with tempfile.TemporaryDirectory(dir=arguments.folder) as place:
        folder = Path(place)
        for part in parts:
            if part == "tokenize":
                tokenize(folder, arguments.rounds, arguments.tokenizer, arguments.text)
            else:
                {"reads": reads, "start": start, "write": write}[part](folder, arguments.rounds)


if __name__ == "__main__":
    main()
