"""A small pretrained model, its data, and trainings of it.

MODEL is a model directory of Hugging Face (SmolLM2-135M-Instruct, say) or one .gguf file, which
`transformers` unpacks (it needs the package `gguf` for that). All that is made of it stands in a
folder, and is not made again.
"""

import json
import subprocess
import sys
import textwrap
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.launch import ROOT, answer
from benchmarks.tuning import one_line
from ptdmpi.base.disk import write_whole

PAGE, WORK = ROOT / "docs/how-to/fine-tuning.md", ROOT / "runs/smol"
LORA = {"method": "lora", "rank": 8, "alpha": 16.0}
Tree = dict[str, dict[str, Any]]


def prepare(source: Path, work: Path = WORK) -> Path:
    """The base of `source` in `work`, whose folder hugging_face/ has its tokenizer."""
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
    """A .gguf file as a model directory in bfloat16, with its tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    given = {"gguf_file": source.name}
    tokenizer = AutoTokenizer.from_pretrained(source.parent, **given)
    whole = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(
        source.parent, **given, dtype=torch.bfloat16, quantization_config=whole
    )
    for one in (model, tokenizer):
        one.save_pretrained(target)


def rows(base: Path, length: int) -> tuple[Path, Path]:
    """The task of `one_line` packed into rows of so many tokens: for training, and held out."""
    work = base.parent
    made = work / f"train-{length}", work / f"valid-{length}"
    if not (work / "valid.jsonl").is_file():
        print(one_line.write(work), flush=True)
    tool = str(Path(sys.executable).with_name("ptdmpi-data"))
    tokenizer = base / "hugging_face/tokenizer.json"
    for target in made:
        if not target.is_dir():
            text = work / f"{target.name.partition('-')[0]}.jsonl"
            words = ["chat", str(text), "--tokenizer", str(tokenizer), "--output", str(target)]
            words += ["--seq-length", str(length), "--too-long", "drop", "--quiet"]
            subprocess.run([tool, *words], check=True, stdout=subprocess.DEVNULL)
    return made


def sizes(base: Path) -> dict[str, Any]:
    """[model] of the base."""
    found: dict[str, Any] = tomllib.loads((base / "config.toml").read_text())["model"]
    return found


def configuration(base: Path, length: int, more: Mapping[str, Mapping[str, Any]]) -> Tree:
    """A training on the task; `more` sets keys of sections beside."""
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
    """The records of a training in `folder`, which is not done again."""
    import tomlkit

    folder.parent.mkdir(parents=True, exist_ok=True)
    path = folder.with_suffix(".toml")
    tree = {**tree, "run": {**tree["run"], "dir": str(folder)}}
    path.write_text(tomlkit.dumps(tree), encoding="utf-8")
    if not (folder / "done").is_file():
        words = [word for one in settings for word in ("--set", one)]
        answer(ranks, ["-m", "ptdmpi", "train", str(path), *words])
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def put(name: str, lines: Sequence[str]) -> None:
    """`lines`, each a row of a table or a paragraph, between the marks `name` of the page."""
    begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->\n"
    head, rest = PAGE.read_text(encoding="utf-8").split(begin)
    wrapped = (one if one.startswith(("|", "!")) else textwrap.fill(one, 118) for one in lines)
    text = "\n".join([*wrapped, ""])
    write_whole(PAGE, head + begin + text + end + rest.split(end)[1])
    print(text)
