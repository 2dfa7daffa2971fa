"""Time and memory from the start of a process to its first batch, for several sizes of the corpus.

The shards are sparse files, whose tokens are 0 and take no space on the disk. All shards of equal
size are links to the same file.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np

from ptdmpi.data.header import SUMMARY, listing, read_header

VOCABULARY_NAMES = ("tokenizer", "tokenizer_sha256", "vocab_size", "eod_id")
VOCABULARY = ("gpt2", "0" * 64, 50257, 50256)
SHARD_TOKENS = 1 << 28

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
batches = TrainBatches(
    [dataset], order, 1024, global_size=8, micro_size=1, data_rank=0, data_size=1
)
microbatch = batches.step(step)[0]
assert microbatch.inputs.shape == (1, 1024)
status = dict(line.split(":", 1) for line in open("/proc/self/status") if ":" in line)
print(json.dumps({name: int(status[name].split()[0]) // 1024 for name in ("VmHWM", "RssAnon")}))
"""
NOTHING = "import h5py, numpy"


def sparse_shard(path: Path, tokens: int) -> None:
    """Write a shard of `tokens` tokens, all of them 0, as a sparse file."""
    with h5py.File(path, "w") as file:
        plan = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        plan.set_layout(h5py.h5d.CONTIGUOUS)
        plan.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
        plan.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
        kind = h5py.h5t.py_create(np.dtype("<u2"))
        space = h5py.h5s.create_simple((tokens,))
        h5py.h5d.create(file.id, b"tokens", kind, space, plan)
        file.create_dataset("documents", data=np.array([0, tokens], "<u8"))
        file.attrs.update(zip(VOCABULARY_NAMES, VOCABULARY, strict=True))
        file.attrs.update(format_version=1, checksum="crc32:00000000")


def sparse_dataset(directory: Path, tokens: int, shard_tokens: int, listed: bool = True) -> Path:
    """Write a dataset of sparse shards, and return its directory. If `listed` is True, also write
    the list of shards that `ptdmpi-data tokenize` writes."""
    directory.mkdir(parents=True)
    paths: list[Path] = []
    for number, start in enumerate(range(0, tokens, shard_tokens)):
        paths.append(directory / f"shard-{number:05d}.h5")
        if number and start + shard_tokens <= tokens:
            os.link(paths[0], paths[-1])
        else:
            sparse_shard(paths[-1], min(shard_tokens, tokens - start))
    if listed:
        first = read_header(paths[0])
        last = read_header(paths[-1])
        headers = [replace(first, path=path) for path in paths[:-1]] + [last]
        text = json.dumps({"shards": listing(headers)}, indent=1)
        (directory / SUMMARY).write_text(text)
    return directory


def start(folder: Path, rounds: int) -> None:
    """Measure processes from their start to their first batch, in at most three rounds, and print
    the seconds and the memory for each size of the corpus."""
    cases = {
        "10^8 tokens, 1 shard": (10**8, 10**8),
        "10^10 tokens, 1 shard": (10**10, 10**10),
        "10^12 tokens, 1 shard": (10**12, 10**12),
        "10^10 tokens, 38 shards": (10**10, SHARD_TOKENS),
        "10^12 tokens, 3,726 shards": (10**12, SHARD_TOKENS),
        "10^12 tokens, 3,726 shards without their list": (10**12, SHARD_TOKENS, False),
    }
    commands: dict[str, list[str]] = {"importing h5py and numpy": ["-c", NOTHING]}
    for name, case in cases.items():
        place = sparse_dataset(folder / f"start{len(commands)}", *case)
        commands[name] = ["-c", FIRST_BATCH, str(place), "0"]
        if len(case) == 2:
            commands[f"{name}, epoch 164"] = [*commands[name][:-1], "163.5"]
    times: dict[str, list[float]] = {name: [] for name in commands}
    memory = {}
    for number in range(min(rounds, 3) + 1):
        for name, arguments in commands.items():
            begun = time.perf_counter()
            done = subprocess.run(
                [sys.executable, *arguments], capture_output=True, check=True, timeout=120
            )
            if number:
                times[name].append(time.perf_counter() - begun)
            memory[name] = json.loads(done.stdout or "{}")
    print("\nstart: process start to first batch")
    for name, measured in times.items():
        sizes = "  ".join(f"{key} {value} MiB" for key, value in memory[name].items())
        middle = statistics.median(measured)
        print(f"  {name:<58} {middle:.2f} s [{min(measured):.2f}, {max(measured):.2f}]  {sizes}")
