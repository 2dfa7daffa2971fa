"""The kinds of runs whose processes the benchmark `every_kind` kills. The module derives the kinds
from the keys of the configuration.

If a configuration key has only a few legal values, each of these values is a kind of run. So there
is a kind for each data-parallel method, compressor, method of error feedback, ZeRO stage, pipeline
schedule, context method, adapter, optimizer, precision, format of quantized weights, task, kind of
model, and so on. A new value or a new key is therefore tested without a change here. LEFT_OUT lists
the keys whose values are not kinds of runs, and the reasons. If a value is legal only together with
other settings, NEEDS has these settings. If NEEDS lacks these settings, an error about the
configuration stops the benchmark.
"""

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import numpy as np

from benchmarks.faults.training import BASE, LIMIT_S, VOCAB_SIZE, Way, prepare, require_base
from benchmarks.launch import start
from ptdmpi.config import Config
from ptdmpi.config.choices import CodesName
from ptdmpi.config.section import Section
from ptdmpi.config.sections import ParallelConfig
from ptdmpi.data.scores.reference import REFERENCE
from ptdmpi.data.scores.stored import ScoreWriter
from ptdmpi.data.shard_writer import ShardWriter
from ptdmpi.data.shards import Dataset

STEPS = 120  # Number of steps of a run: enough for up to 20 deaths before the run ends.
# Section or key whose values are not tried as kinds of runs -> the reason.
LEFT_OUT: Mapping[str, str] = {
    "run": "how a run starts, stops and recovers, which `torture` and the tests try",
    "model": "other operators, but no other kinds of state; `model.kind` names whole models",
    "batch": "numbers only",
    "log": "the records of a run",
    "data": "the source of the samples",
    "checkpoint": "saves, which `torture` tries",
    "comm": "how messages travel",
    "parallel.shard_group": '"node" needs several nodes; `torture` tries groups by number',
    "parallel.scatter_gather": "how messages travel",
    "parallel.data": "the size of an axis",
    "parallel.first_layers": "a number",
    "parallel.expert_tensor": "a number",
    "adapt.targets": "names of linears",
    "recompute.layers": "a number",
}
# keys that are tried, although their sections are in LEFT_OUT
KEPT = ("model.kind", "model.balance", "run.reproducible")
# Key -> the words with which the names of its kinds begin. For all other keys, the names begin with
# the key's name and a hyphen.
PREFIXES: Mapping[str, str] = {
    "parallel.schedule": "",
    "parallel.context_method": "context-",
    "data_parallel.method": "",
    "data_parallel.compressor": "compressed-",
    "data_parallel.error_feedback": "feedback-",
    "data_parallel.checkpoint": "checkpoint-",
    "adapt.method": "",
    "precision.compute": "",
    "quantize.weights": "quantized-",
    "recompute.mode": "recompute-",
    "optimizer.kind": "",
    "task.kind": "",
    "preference.method": "",
    "model.kind": "",
}
BLOCK = 8  # number of elements in a block of quantized weights
SEQUENCE = 8  # tokens in a row, which has one preference pair; equal to model.seq_length
ADAPTED = (f"adapt.base={BASE}",)
CHUNKS = ("parallel.virtual=2", "model.layers=4")
EXPERTS = ("model.kind=llama", "model.experts=4", "model.experts_per_token=2")
LATENT = ("model.head_size=12", "model.rope_head_size=4", "model.kv_lora_rank=8")
COMPRESSED = ("data_parallel.method=compressed", "data_parallel.compressor=top_k")
DIFFERING = ("data_parallel.method=decentralized",)
MUON = ("optimizer.kind=muon",)
# Key, or key=value -> the further settings that a run with it needs. If both a key and key=value
# have an entry, only the entry of key=value is used.
NEEDS: Mapping[str, tuple[str, ...]] = {
    "parallel.schedule": ("parallel.pipeline=2",),
    "parallel.schedule=interleaved": ("parallel.pipeline=2", *CHUNKS),
    "parallel.schedule=zb-v": ("parallel.pipeline=2", *CHUNKS),
    "parallel.context_method": ("parallel.context=2",),
    "parallel.sequence_parallel": ("parallel.tensor=2",),
    "data_parallel.method=local": ("data_parallel.local_steps=2",),
    "data_parallel.method=compressed": ("data_parallel.compressor=sign",),
    "data_parallel.compressor": COMPRESSED[:1],
    "data_parallel.error_feedback": COMPRESSED,
    "data_parallel.overlap": DIFFERING,
    "data_parallel.average_moments": DIFFERING,
    "data_parallel.checkpoint": DIFFERING,
    "adapt.method": ADAPTED,
    "precision.fp8": ("precision.compute=fp8",),
    "quantize.weights": (f"quantize.block={BLOCK}",),
    "recompute.partition_activations": ("parallel.tensor=2", "recompute.mode=full"),
    "optimizer.kind=own": ("optimizer.own=benchmarks.faults.own:Momentum",),
    "optimizer.nesterov": ("optimizer.kind=sgd", "optimizer.momentum=0.9"),
    "optimizer.muon_scale": MUON,
    "model.kind=bert": ("data.whole_words=false",),
    "model.kind=deepseek": LATENT,
    "model.balance": EXPERTS,
    "task.kind=classification": (
        'task.labels=["a","b"]',
        'data.train=[{path="labelled.jsonl"}]',
        "task.tokenizer=bytes",
    ),
    "task.kind=choice": (
        "task.choices=2",
        'data.train=[{path="choices.jsonl"}]',
        "task.tokenizer=bytes",
        "batch.micro_size=2",
    ),
    "preference.method": ("data.document_boundaries=true", 'data.train=[{path="pairs"}]'),
}
# Format of quantized weights -> the options with which `ptdmpi quantize` writes a base in this
# format.
CODES: Mapping[str, tuple[str, ...]] = {
    "int8": ("--bits", "8"),
    "int4": ("--bits", "4"),
    "uint4": ("--bits", "4", "--asymmetric"),
    "nf4": ("--bits", "4", "--nf4"),
}


def names_of(literal: object) -> tuple[str, ...]:
    """Return the names in a `Literal` type, except "none"."""
    return tuple(name for name in get_args(literal) if name != "none")


def choices() -> Iterator[tuple[str, Any, bool]]:
    """Yield (key, value, True if the value is the default) for each value of each configuration key
    that has only a few legal values and is not in LEFT_OUT. Leave out the value "none", and the
    value False if it is the default."""
    for name, section in Config.sections().items():
        for key, field in section.model_fields.items():
            word = f"{name}.{key}"
            if word not in KEPT and (word in LEFT_OUT or name in LEFT_OUT):
                continue
            for value in values_in(field.annotation):
                default = value == field.default
                if value != "none" and not (value is False and default):
                    yield word, value, default


def values_in(kind: Any) -> list[Any]:
    """Return the values of all Literals in an annotation, and the values of a bool."""
    if kind is bool:
        return [False, True]
    if get_origin(kind) is Literal:
        return list(get_args(kind))
    return [value for part in get_args(kind) for value in values_in(part)]


def every_kind() -> dict[str, Way]:
    """Return the layout and the settings of each kind of run, by the name of the kind."""
    ways: dict[str, Way] = {}

    def add(name: str, ranks: int, *settings: str) -> None:
        ways[name] = Way(name, ranks, (f"run.steps={STEPS}", *settings))

    add("all_reduce", 2)
    for key, value, default in sorted(choices(), key=lambda choice: choice[2]):
        needs = NEEDS.get(f"{key}={value}", NEEDS.get(key, ()))
        # a run with a default value is left out if it is the same as a run of an earlier kind
        if not default or all({*needs} != {*way.settings[1:]} for way in ways.values()):
            add(_name(key, value), 2, *needs, f"{key}={_toml(value)}")
    for stage in range(1, _most(ParallelConfig, "zero") + 1):
        add(f"zero-{stage}", 2 if stage % 2 else 4, f"parallel.zero={stage}")
    for codes in names_of(CodesName):
        words = (f"quantize.weights={codes}", f"quantize.block={BLOCK}")
        frozen = ("adapt.method=lora", f"adapt.base={BASE}-{codes}")
        add(f"quantized-base-{codes}", 2, *words, *frozen)
    add("ema", 2, "optimizer.ema_decay=0.9")
    add("tensor", 2, "parallel.tensor=2")
    add("tensor-pipeline", 4, "parallel.tensor=2", "parallel.pipeline=2")
    add("expert", 2, "parallel.expert=2", *EXPERTS)
    add("three", 3, "batch.global_size=6")
    return ways


def _name(key: str, value: Any) -> str:
    word = key.partition(".")[2]
    if isinstance(value, bool):
        return word if value else f"no-{word}"
    return f"{PREFIXES.get(key, f'{word}-')}{value}"


def _toml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


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
    # Each of the two sequences of a pair has two tokens of a prompt, and then an answer. Only the
    # tokens of answers count in the loss.
    counts = np.arange(SEQUENCE) % (SEQUENCE // 2) > 1
    ends = np.array([SEQUENCE // 2, SEQUENCE])
    path = folder / "shard-00000.h5"
    sizes = {"vocab_size": VOCAB_SIZE, "eod_id": VOCAB_SIZE - 1, "row_length": SEQUENCE}
    with ShardWriter(path, "torture", "0" * 64, **sizes, pairs=True) as writer:
        for _ in range(64):
            writer.write_row(draws.integers(0, VOCAB_SIZE - 1, SEQUENCE), ends, counts)
        # a shard of rows ends with one extra token, which is the label of the last token
        writer.write_row(np.array([VOCAB_SIZE - 1]), np.array([1]), np.array([False]))
    (header,) = Dataset(folder).headers
    values = draws.normal(-3.0, 0.5, header.tokens).astype(np.float32)
    with ScoreWriter(REFERENCE, header) as scores:
        scores.open({"": (np.float32, ())})
        scores.append({"": values})
        shards = {path.name: scores.close()}
    REFERENCE.write_summary(folder, {"model": "drawn", "shards": shards})
