"""The kinds of runs whose processes the benchmark `every_kind` kills. They are made from ptdmpi's
tables of legal names.

A kind is a data-parallel method, compressor, ZeRO stage, schedule, adapter, format of trained or
frozen quantized weights, precision, task, preference method or axis. If a name is added to one of
these tables, a new kind is tested, too. If the new name needs further settings that the tables
`METHODS`, `SCHEDULES` and `TASKS` do not have, an error about the configuration stops the
benchmark.
"""

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import get_args

import numpy as np

from benchmarks.faults.training import BASE, LIMIT_S, VOCAB_SIZE, Way, prepare, require_base
from benchmarks.launch import start
from ptdmpi.config.adapt import AdaptMethod
from ptdmpi.config.choices import CodesName, ScheduleName
from ptdmpi.config.methods import CompressorName, MethodName
from ptdmpi.config.precision import PrecisionName
from ptdmpi.config.section import Section
from ptdmpi.config.sections import ParallelConfig, PreferenceConfig, TaskConfig
from ptdmpi.data.scores.reference import REFERENCE
from ptdmpi.data.scores.stored import ScoreWriter
from ptdmpi.data.shard_writer import ShardWriter
from ptdmpi.data.shards import Dataset

STEPS = 120  # Number of steps of a run, so that a run trains some dozen steps between two deaths.
# Name in a table of legal names -> additional settings that a run with this name needs.
METHODS: Mapping[str, tuple[str, ...]] = {
    "local": ("data_parallel.local_steps=2",),
    "compressed": ("data_parallel.compressor=sign",),
}
SCHEDULES: Mapping[str, tuple[str, ...]] = {
    "interleaved": ("parallel.virtual=2", "model.layers=4"),
    "zb-v": ("parallel.virtual=2", "model.layers=4"),
}
ADAPTED = (f"adapt.base={BASE}",)
TASKS: Mapping[str, tuple[str, ...]] = {
    "classification": ('task.labels=["a","b"]', 'data.train=[{path="labelled.jsonl"}]'),
    "choice": ("task.choices=2", 'data.train=[{path="choices.jsonl"}]', "batch.micro_size=2"),
}
# Format of quantized weights -> the options with which `ptdmpi quantize` writes a base in this
# format.
CODES: Mapping[str, tuple[str, ...]] = {
    "int8": ("--bits", "8"),
    "int4": ("--bits", "4"),
    "uint4": ("--bits", "4", "--asymmetric"),
    "nf4": ("--bits", "4", "--nf4"),
}
BLOCK = 8  # number of elements in a block of quantized weights
PAIRED = ("data.document_boundaries=true", 'data.train=[{path="pairs"}]')
EXPERTS = ("model.kind=llama", "model.experts=4", "model.experts_per_token=2")
SEQUENCE = 8  # number of tokens in a row of pairs, which is model.seq_length


def names_of(literal: object) -> tuple[str, ...]:
    """Return the names in a `Literal` type, except "none"."""
    return tuple(name for name in get_args(literal) if name != "none")


def every_kind() -> dict[str, Way]:
    """Return the layout and the settings of each kind of run, by the name of the kind."""
    ways: dict[str, Way] = {}

    def add(name: str, ranks: int, *settings: str) -> None:
        ways[name] = Way(name, ranks, (f"run.steps={STEPS}", *settings))

    for method in names_of(MethodName):
        add(method, 2, f"data_parallel.method={method}", *METHODS.get(method, ()))
    for compressor in names_of(CompressorName):
        words = ("data_parallel.method=compressed", f"data_parallel.compressor={compressor}")
        add(f"compressed-{compressor}", 2, *words)
    for stage in range(1, _most(ParallelConfig, "zero") + 1):
        add(f"zero-{stage}", 2 if stage % 2 else 4, f"parallel.zero={stage}")
    for schedule in names_of(ScheduleName):
        words = ("parallel.pipeline=2", f"parallel.schedule={schedule}")
        add(schedule, 2, *words, *SCHEDULES.get(schedule, ()))
    for adapter in names_of(AdaptMethod):
        add(adapter, 2, f"adapt.method={adapter}", *ADAPTED)
    for task in names_of(TaskConfig.model_fields["kind"].annotation):
        add(task, 2, f"task.kind={task}", "task.tokenizer=bytes", *TASKS[task])
    add("tensor", 2, "parallel.tensor=2")
    add("context", 2, "parallel.context=2")
    for method in names_of(PreferenceConfig.model_fields["method"].annotation):
        add(method, 2, f"preference.method={method}", *PAIRED)
    for codes in names_of(CodesName):
        words = (f"quantize.weights={codes}", f"quantize.block={BLOCK}")
        add(f"quantized-{codes}", 2, *words)
        frozen = ("adapt.method=lora", f"adapt.base={BASE}-{codes}")
        add(f"quantized-base-{codes}", 2, *words, *frozen)
    for precision in names_of(PrecisionName):
        add(precision, 2, f"precision.compute={precision}")
    add("expert", 2, "parallel.expert=2", *EXPERTS)
    add("three", 3, "batch.global_size=6")
    return ways


def _most(section: type[Section], key: str) -> int:
    """Return the greatest legal value of the key `key` in a section of the configuration."""
    limits = [getattr(limit, "le", None) for limit in section.model_fields[key].metadata]
    return next(limit for limit in limits if limit is not None)


def prepare_all(folder: Path) -> None:
    """Write the configuration, the token shards and the labelled texts for all runs into
    `folder`."""
    prepare(folder)
    texts = [f"text {number}" for number in range(64)]
    labelled = [{"text": text, "label": "ab"[len(text) % 2]} for text in texts]
    choices = [{"context": text, "choices": ["x", "y"], "answer": 0} for text in texts]
    for name, rows in (("labelled", labelled), ("choices", choices)):
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(lines)
    prepare_pairs(folder / "pairs")


def require_bases(folder: Path, way: Way) -> None:
    """Make the frozen base model of the runs of the kind `way`, unless the base exists or these
    runs train no adapters."""
    names = [words[1] for words in map(_pair, way.settings) if words[0] == "adapt.base"]
    for name in names:
        require_base(folder)
        codes = name.removeprefix(BASE).removeprefix("-")
        if codes and not (folder / name).is_dir():
            options = ("--block", str(BLOCK), *CODES[codes])
            command = [sys.executable, "-m", "ptdmpi", "quantize", BASE, name, *options]
            made = start(command, subprocess.PIPE, cwd=folder)
            text, _ = made.communicate(timeout=LIMIT_S)
            if made.returncode:
                raise RuntimeError(f"the base {name} was not made:\n{text}")


def _pair(setting: str) -> tuple[str, str]:
    key, _, value = setting.partition("=")
    return key, value


def prepare_pairs(folder: Path) -> None:
    """Write shards whose rows have one pair of answers each, with random numbers instead of the
    log-probabilities of a reference model."""
    folder.mkdir()
    draws = np.random.default_rng(2)
    # both sequences of a pair: two tokens of a prompt, then an answer
    counts = np.arange(SEQUENCE) % (SEQUENCE // 2) > 1
    ends = np.array([SEQUENCE // 2, SEQUENCE])
    path = folder / "shard-00000.h5"
    sizes = {"vocab_size": VOCAB_SIZE, "eod_id": VOCAB_SIZE - 1, "row_length": SEQUENCE}
    with ShardWriter(path, "torture", "0" * 64, **sizes, pairs=True) as writer:
        for _ in range(64):
            writer.write_row(draws.integers(0, VOCAB_SIZE - 1, SEQUENCE), ends, counts)
        # a shard of rows ends with one extra token, because the labels of a row are the tokens that
        # follow
        writer.write_row(np.array([VOCAB_SIZE - 1]), np.array([1]), np.array([False]))
    (header,) = Dataset(folder).headers
    values = draws.normal(-3.0, 0.5, header.tokens).astype(np.float32)
    with ScoreWriter(REFERENCE, header) as scores:
        scores.open({"": (np.float32, ())})
        scores.append({"": values})
        shards = {path.name: scores.close()}
    REFERENCE.write_summary(folder, {"model": "drawn", "shards": shards})
