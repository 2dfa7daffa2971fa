"""`python -m benchmarks.tuning.experts [FOLDER]`: a mixture of experts compared with a dense model.

Both models are small, and are trained on the text of `make demo` with the same batches, learning
rates and number of steps. The experts of a token together are as wide as the MLP of the dense
model, so both models have equally many active parameters, except for the routers. The benchmark
writes a table of the losses of both models into docs/how-to/experts.md, and draws
docs/pictures/experts.png. Training runs are kept in FOLDER, and are not repeated.
"""

import json
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.launch import ROOT
from benchmarks.marks import put, table
from benchmarks.tuning import smol
from ptdmpi.config import ModelConfig
from ptdmpi.plan.shape.parameters import active_count, parameter_count

PAGE = ROOT / "docs/how-to/experts.md"
PICTURE = ROOT / "docs/pictures/experts.png"
WORK = ROOT / "runs/experts"
DATA = ROOT / "runs/demo-data"
SIZES = {"kind": "llama", "layers": 2, "hidden": 64, "heads": 4, "seq_length": 128}
WIDTH = 256  # the width of the dense MLP
EXPERTS = 8
CHOSEN = 2  # experts of a token
DENSE, MIXTURE = "dense", "mixture"
MODELS: dict[str, dict[str, Any]] = {
    DENSE: {"ffn_hidden": WIDTH},
    MIXTURE: {
        "experts": EXPERTS,
        "experts_per_token": CHOSEN,
        "expert_hidden": WIDTH // CHOSEN,
    },
}
NAMES = {DENSE: "dense", MIXTURE: f"{EXPERTS} experts, {CHOSEN} of a token"}
RATE = 4e-3
SEEDS = (1, 2)
STEPS = 600
EVERY = 100  # steps between validations
# a model, and the seed of its initial weights and of the order of its data
Key = tuple[str, int]


def configuration(name: str, seed: int) -> smol.Tree:
    """Return the configuration for training the model `name` of MODELS with the given seed."""
    return {
        "run": {"steps": STEPS, "seed": seed},
        "model": {**SIZES, **MODELS[name]},
        "batch": {"global_size": 16, "micro_size": 16},
        "optimizer": {"learning_rate": RATE, "warmup_steps": 50},
        "data": {"train": [{"path": str(DATA / "train")}], "valid": str(DATA / "valid")},
        "checkpoint": {"every_minutes": 0.0},
        "log": {"every_steps": EVERY, "validate_every_steps": EVERY},
    }


def counts(name: str, vocab_size: int) -> tuple[int, int]:
    """Return the numbers of all parameters and of active parameters of a model."""
    model = ModelConfig(**SIZES, **MODELS[name])
    return parameter_count(model, vocab_size), active_count(model, vocab_size)


def curve(records: Sequence[Mapping[str, Any]]) -> dict[int, float]:
    """Return the validation loss after each step that has a validation."""
    return {
        record["step"]: record["validation_loss"]
        for record in records
        if "validation_loss" in record
    }


def lines(curves: Mapping[Key, Mapping[int, float]], vocab_size: int) -> Iterator[str]:
    """Yield the lines of the table: the numbers of parameters, and the mean over the seeds of the
    validation loss after each step. The last cell of a row also has the smallest and the greatest
    last loss. After the table, yield a line with the difference between the last losses of the two
    models for each seed."""
    steps = list(next(iter(curves.values())))
    last = steps[-1]
    rows = []
    for name, title in NAMES.items():
        whole, active = counts(name, vocab_size)
        own = [of_run for (model, _), of_run in curves.items() if model == name]
        means = [statistics.fmean(of_run[step] for of_run in own) for step in steps]
        ends = [of_run[last] for of_run in own]
        cells = [f"{mean:.3f}" for mean in means]
        cells[-1] += f" ({min(ends):.3f} to {max(ends):.3f})"
        rows.append([title, f"{whole:,}", f"{active:,}", *cells])
    head = ["model", "parameters", "active", *(f"step {step}" for step in steps)]
    yield from table(head, rows)
    apart = [
        curves[MIXTURE, seed][last] - curves[DENSE, seed][last]
        for model, seed in curves
        if model == DENSE
    ]
    yield ""
    yield (
        f"Validation loss, mean of {len(apart)} seeds. Difference at the end for each seed: "
        f"{', '.join(f'{value:+.3f}' for value in apart)}."
    )


def draw(curves: Mapping[Key, Mapping[int, float]]) -> None:
    """Draw the validation loss over the steps, with one line for each run, and the difference of
    the two models, with one line for each seed."""
    from matplotlib.figure import Figure

    canvas = Figure(figsize=(8.4, 3.4), dpi=100, layout="constrained")
    left, right = canvas.subplots(1, 2)
    colors = {DENSE: "C0", MIXTURE: "C1"}
    for (name, seed), of_run in curves.items():
        label = NAMES[name] if seed == SEEDS[0] else None
        points = (list(of_run), list(of_run.values()))
        left.plot(*points, "o-", color=colors[name], label=label, markersize=3)
    for seed, style in zip(SEEDS, ("-", "--"), strict=True):
        dense, mixture = curves[DENSE, seed], curves[MIXTURE, seed]
        apart = [mixture[step] - loss for step, loss in dense.items()]
        right.plot(list(dense), apart, f"o{style}", color="#777777", label=f"seed {seed}")
    right.axhline(0.0, color="black", linewidth=0.8)
    left.set_title("validation loss", loc="left", fontsize=10)
    right.set_title("experts minus dense", loc="left", fontsize=10)
    for axes in (left, right):
        axes.set_xlabel("step")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#eeeeee")
        axes.legend(frameon=False, fontsize=8)
    canvas.savefig(PICTURE)


def main(work: Path = WORK) -> None:
    """Train both models, and write the table and the picture."""
    if not (DATA / "valid").is_dir():
        sys.exit(f"{DATA} has no valid/: `make demo` makes the demo's shards")
    curves = {
        (name, seed): curve(
            smol.train(work.resolve() / f"{name}-{seed}", 1, configuration(name, seed))
        )
        for seed in SEEDS
        for name in MODELS
    }
    tokenizer = json.loads((DATA / "tokenizer.json").read_text(encoding="utf-8"))
    draw(curves)
    put(PAGE, "dense-and-experts", list(lines(curves, len(tokenizer["model"]["vocab"]))))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
