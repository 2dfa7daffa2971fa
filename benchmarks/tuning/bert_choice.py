"""BERT on a multiple-choice task, with its norms before and behind the layers, at two depths.

`python -m benchmarks.tuning.bert_choice CORPUS.jsonl FOLDER`: trains four models from nothing on
the task of `continuations`, one after the other (those that are done are kept), and prints a table.
Shoeybi et al. 2019, Figure 7:
BERT's own order (norms behind the residual sum, "post") fails to train as models grow, norms before
each part ("pre") do not.
"""

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.launch import answer
from benchmarks.tuning import continuations

DEPTHS, ORDERS = (2, 6), ("pre", "post")
VOCAB_SIZE, SAMPLE_BYTES = 2048, 4_000_000
MODEL = {"kind": "bert", "hidden": 64, "heads": 4, "ffn_hidden": 128, "seq_length": 128}
# at this width the usual 0.02 leaves the residual stream almost alone
MODEL |= {"init_std": 0.08}
QUESTIONS, STEPS, VALIDATED = 16, 2000, 1000
LIMIT_S = 4 * 3600.0


def configuration(folder: Path, depth: int, order: str, steps: int) -> Mapping[str, Any]:
    """One training on the files of `folder`."""
    return {
        "run": {"dir": str(folder / f"{order}-{depth}"), "steps": steps},
        # with its norms in front BERT has none behind the embedding, as in Megatron-LM
        "model": {
            **MODEL,
            "layers": depth,
            "block_norm": order,
            "embedding_norm": order == "post",
        },
        "batch": {
            "global_size": QUESTIONS * continuations.CHOICES,
            "micro_size": QUESTIONS * continuations.CHOICES,
        },
        "optimizer": {"learning_rate": 1.5e-3, "warmup_steps": steps // 10, "weight_decay": 0.01},
        "task": {
            "kind": "choice",
            "choices": continuations.CHOICES,
            "tokenizer": str(folder / "tokenizer.json"),
        },
        "data": {
            "train": [{"path": str(folder / "train.jsonl")}],
            "valid": str(folder / "valid.jsonl"),
        },
        "checkpoint": {"every_minutes": 0.0, "resume": "auto"},
        "log": {"validate_every_steps": steps // 4, "validate_samples": VALIDATED},
    }


def trained(folder: Path, depth: int, order: str, count: int) -> dict[str, Any]:
    """What one training came to."""
    import tomlkit

    path = folder / f"{order}-{depth}.toml"
    path.write_text(tomlkit.dumps(configuration(folder, depth, order, count)), encoding="utf-8")
    if not (folder / f"{order}-{depth}" / "done").is_file():
        answer(1, ["-m", "ptdmpi", "train", str(path)], LIMIT_S)
    lines = (folder / f"{order}-{depth}" / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    steps = [one for one in records if "loss" in one]
    validations = [one for one in records if "validation_accuracy" in one]
    return {
        "layers": depth,
        "norms": order,
        "loss": sum(one["loss"] for one in steps[-50:]) / len(steps[-50:]),
        "accuracies": [one["validation_accuracy"] for one in validations],
        "elapsed_s": sum(one["step_time_s"] for one in steps),
    }


def prepare(corpus: Path, folder: Path) -> dict[str, int]:
    """The task's files and its tokenizer, where they are not there yet."""
    counts = continuations.write(corpus, folder)
    if not (folder / "tokenizer.json").is_file():
        tool = Path(sys.executable).with_name("ptdmpi-data")
        command = [str(tool), "train-tokenizer", str(corpus), "--quiet"]
        sizes = ["--vocab-size", str(VOCAB_SIZE), "--sample-bytes", str(SAMPLE_BYTES)]
        subprocess.run([*command, *sizes, "--output", str(folder / "tokenizer.json")], check=True)
    return counts


def table(found: list[dict[str, Any]]) -> str:
    """Markdown: a row for each training."""
    quarters = " | ".join(f"after {k}/4" for k in range(1, 5))
    lines = [f"| layers | norms | mean loss, last 50 | {quarters} | s |", "|---" * 8 + "|"]
    for one in found:
        shares = " | ".join(f"{share:.1%}" for share in one["accuracies"])
        lines.append(
            f"| {one['layers']} | {one['norms']} | {one['loss']:.3f} | {shares} | "
            f"{one['elapsed_s']:.0f} |"
        )
    return "\n".join(lines)


def main(corpus: Path, folder: Path, steps: int = STEPS) -> None:
    print(prepare(corpus, folder), flush=True)
    found = []
    for depth in DEPTHS:
        for order in ORDERS:
            found.append(trained(folder, depth, order, steps))
            print(json.dumps(found[-1]), flush=True)
    print(table(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), *map(int, sys.argv[3:]))
