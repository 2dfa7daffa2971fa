"""A small pretrained model, training data for it, and training runs that begin from this model.

The argument MODEL of the benchmarks is a model directory of Hugging Face (SmolLM2-135M-Instruct,
for example) or a .gguf file, which `transformers` unpacks with the package `gguf`. All results are
stored in a folder, and existing results are not computed again.
"""

import json
import subprocess
import sys
import textwrap
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import marks
from benchmarks.launch import ROOT, answer
from benchmarks.tuning import one_line

PAGE = ROOT / "docs/how-to/fine-tuning.md"
WORK = ROOT / "runs/smol"
LORA = {"method": "lora", "rank": 8, "alpha": 16.0}
Tree = dict[str, dict[str, Any]]


def prepare(source: Path, work: Path = WORK) -> Path:
    """Convert `source` into a base model in `work`, unless the base model exists, and return its
    directory. The folder hugging_face/ of the base model contains the tokenizer."""
    work = work.resolve()
    base = work / "base"
    if base.is_dir():
        return base
    work.mkdir(parents=True, exist_ok=True)
    if source.suffix == ".gguf":
        unpack(source, work / "unpacked")
        source = work / "unpacked"
    elif not (work / "unpacked").exists():
        (work / "unpacked").symlink_to(source.resolve())
    answer(1, ["-m", "ptdmpi", "convert", "from-hf", str(source), str(base), "--quiet"])
    return base


def unpack(source: Path, target: Path) -> None:
    """Convert the .gguf file `source` to a Hugging Face model directory `target`, with dequantized
    weights in bfloat16 and the tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    file = {"gguf_file": source.name}
    tokenizer = AutoTokenizer.from_pretrained(source.parent, **file)
    whole = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(
        source.parent, **file, dtype=torch.bfloat16, quantization_config=whole
    )
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


def rows(base: Path, length: int) -> tuple[Path, Path]:
    """Pack the task of `one_line` into rows of `length` tokens, unless the rows exist already.
    Return the folders for training and for validation."""
    work = base.parent
    folders = (work / f"train-{length}", work / f"valid-{length}")
    if not (work / "valid.jsonl").is_file():
        print(one_line.write(work), flush=True)
    tool = str(Path(sys.executable).with_name("ptdmpi-data"))
    tokenizer = base / "hugging_face/tokenizer.json"
    for target in folders:
        if not target.is_dir():
            text = work / f"{target.name.partition('-')[0]}.jsonl"
            words = ["chat", str(text), "--tokenizer", str(tokenizer), "--output", str(target)]
            words += ["--seq-length", str(length), "--too-long", "drop", "--quiet"]
            subprocess.run([tool, *words], check=True, stdout=subprocess.DEVNULL)
    return folders


def sizes(base: Path) -> dict[str, Any]:
    """Return the section [model] of the base model's configuration."""
    section: dict[str, Any] = tomllib.loads((base / "config.toml").read_text())["model"]
    return section


def configuration(base: Path, length: int, more: Mapping[str, Mapping[str, Any]]) -> Tree:
    """Return the configuration of a training run on the task, with the additional keys `more`."""
    train, valid = rows(base, length)
    tree: Tree = {
        "model": {**sizes(base), "seq_length": length},
        "data": {
            "train": [{"path": str(train)}],
            "valid": str(valid),
            "document_boundaries": True,
        },
        "checkpoint": {"every_minutes": 0.0},
    }
    for name, keys in more.items():
        tree[name] = {**tree.get(name, {}), **keys}
    return tree


def train(folder: Path, ranks: int, tree: Tree, settings: Sequence[str] = ()) -> list[Any]:
    """Train the configuration `tree`, with the options `settings` for `--set`, in the run directory
    `folder`, unless the run is already complete. Return the records of metrics.jsonl."""
    import tomlkit

    folder.parent.mkdir(parents=True, exist_ok=True)
    path = folder.with_suffix(".toml")
    tree = {**tree, "run": {**tree["run"], "dir": str(folder)}}
    path.write_text(tomlkit.dumps(tree), encoding="utf-8")
    if not (folder / "done").is_file():
        words = [word for setting in settings for word in ("--set", setting)]
        answer(ranks, ["-m", "ptdmpi", "train", str(path), *words])
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def put(name: str, lines: Sequence[str]) -> None:
    """Write `lines` between the marks `name` in the page. Each line is a row of a table, a picture
    or a paragraph."""
    wrapped = [line if line.startswith(("|", "!")) else textwrap.fill(line, 118) for line in lines]
    marks.put(PAGE, name, wrapped)
