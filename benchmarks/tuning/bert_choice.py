"""BERT on a multiple-choice task, with norms before or after the residual sums, at two depths.

`python -m benchmarks.tuning.bert_choice CORPUS.jsonl FOLDER` trains four models from random weights
on the task of `continuations`, one after another, and prints a table. A run that is already
complete in FOLDER is not repeated. In BERT's original order, norms come after the residual sums
("post"), and training fails for large models. If norms come before attention and MLP ("pre"),
training of large models does not fail (Shoeybi et al. 2019, Figure 7). This benchmark
compares the two orders.
"""

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.launch import answer
from benchmarks.marks import table
from benchmarks.tuning import continuations

DEPTHS = (2, 6)
ORDERS = ("pre", "post")
VOCAB_SIZE = 2048
SAMPLE_BYTES = 4_000_000
MODEL = {"kind": "bert", "hidden": 64, "heads": 4, "ffn_hidden": 128, "seq_length": 128}
# The usual standard deviation of initial weights, 0.02, is too small at this width: the layers
# would hardly change the residual stream.
MODEL |= {"init_std": 0.08}
QUESTIONS = 16
STEPS = 2000
VALIDATED = 1000
LIMIT_S = 4 * 3600.0


def configuration(folder: Path, depth: int, order: str) -> Mapping[str, Any]:
    """Return the configuration of a training run on the files in `folder`, for a model with `depth`
    layers and the order of norms `order` ("pre" or "post")."""
    return {
        "run": {"dir": str(folder / f"{order}-{depth}"), "steps": STEPS},
        # with norms before attention and MLP, there is no norm after the embedding, as in
        # Megatron-LM
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
        "optimizer": {"learning_rate": 1.5e-3, "warmup_steps": STEPS // 10, "weight_decay": 0.01},
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
        "log": {"validate_every_steps": STEPS // 4, "validate_samples": VALIDATED},
    }


def trained(folder: Path, depth: int, order: str) -> dict[str, Any]:
    """Train the model with `depth` layers and the order of norms `order`, unless its run is already
    complete, and return the results for its row of the table."""
    import tomlkit

    path = folder / f"{order}-{depth}.toml"
    path.write_text(tomlkit.dumps(configuration(folder, depth, order)), encoding="utf-8")
    if not (folder / f"{order}-{depth}" / "done").is_file():
        answer(1, ["-m", "ptdmpi", "train", str(path)], LIMIT_S)
    lines = (folder / f"{order}-{depth}" / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    steps = [record for record in records if "loss" in record]
    validations = [record for record in records if "validation_accuracy" in record]
    return {
        "layers": depth,
        "norms": order,
        "loss": sum(step["loss"] for step in steps[-50:]) / len(steps[-50:]),
        "accuracies": [record["validation_accuracy"] for record in validations],
        "elapsed_s": sum(step["step_time_s"] for step in steps),
    }


def prepare(corpus: Path, folder: Path) -> dict[str, int]:
    """Write the task's files and, unless it exists, the tokenizer. Return the number of questions
    in each file."""
    counts = continuations.write(corpus, folder)
    if not (folder / "tokenizer.json").is_file():
        tool = Path(sys.executable).with_name("ptdmpi-data")
        command = [str(tool), "train-tokenizer", str(corpus), "--quiet"]
        sizes = ["--vocab-size", str(VOCAB_SIZE), "--sample-bytes", str(SAMPLE_BYTES)]
        subprocess.run([*command, *sizes, "--output", str(folder / "tokenizer.json")], check=True)
    return counts


def row(run: dict[str, Any]) -> list[str]:
    """Return the cells of the table row for a training run, which `trained` has returned."""
    return [
        str(run["layers"]),
        run["norms"],
        f"{run['loss']:.3f}",
        *(f"{share:.1%}" for share in run["accuracies"]),
        f"{run['elapsed_s']:.0f}",
    ]


def main(corpus: Path, folder: Path) -> None:
    """Train all models, and print a table."""
    print(prepare(corpus, folder), flush=True)
    runs = []
    for depth in DEPTHS:
        for order in ORDERS:
            runs.append(trained(folder, depth, order))
            print(json.dumps(runs[-1]), flush=True)
    quarters = [f"after {k}/4" for k in range(1, 5)]
    head = ["layers", "norms", "mean loss, last 50", *quarters, "s"]
    print("\n".join(table(head, map(row, runs))))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
