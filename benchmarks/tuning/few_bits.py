"""`python -m benchmarks.tuning.few_bits [MODEL DATA]`: the perplexity of quantized models.

The benchmark quantizes a model to int8, int4, uint4 and nf4, by rounding and by GPTQ. The model is
MODEL, with the shards in DATA/train and DATA/valid; without MODEL it is the demo's model
(jobs/demo.toml, on the shards of `make demo`). Then the benchmark trains the model further, with
and without rounded weights, and quantizes both results. The tables are written between marks in
docs/how-to/quantization.md. Runs and results are stored in runs/few-bits, and existing ones are
used again.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.launch import ROOT, answer
from benchmarks.marks import put, table
from benchmarks.tuning import smol

PAGE = ROOT / "docs/how-to/quantization.md"
WORK = ROOT / "runs/few-bits"
DATA = ROOT / "runs/demo-data"
SERIAL = ("tensor=1", "pipeline=1", "virtual=1")
STEPS = 600
MORE_STEPS = 200  # steps of further training of the demo's model, at a quarter of its learning rate
# settings for the further training of a pretrained model
PRETRAINED_STEPS = 24
LENGTH = 256
BATCH = 2
RATE = 1e-4
FORMS = {  # maps the names of codes and block sizes to options of `ptdmpi quantize`
    "int8, 64": ["--bits", "8"],
    "int4, 64": ["--bits", "4"],
    "int4, 32": ["--bits", "4", "--block", "32"],
    "uint4, 64": ["--bits", "4", "--asymmetric"],
    "uint4, 32": ["--bits", "4", "--asymmetric", "--block", "32"],
    "nf4, 64": ["--bits", "4", "--nf4"],
}
METHODS = ("absmax", "gptq")


def train(name: str, steps: int, *settings: str) -> Path:
    """Train the demo's model on one rank, unless the run is already complete, and return its run
    directory. A training run that was stopped is resumed."""
    folder = WORK / name
    if not (folder / "checkpoints" / f"step-{steps:08d}").is_dir():
        every = [f"parallel.{axis}" for axis in SERIAL]
        every += [f"run.name={name}", f"run.dir={folder}", "checkpoint.resume=auto"]
        every += [f"run.steps={steps}", *settings]
        every += [f"data.valid={DATA / 'valid'}"]
        words = [word for setting in every for word in ("--set", setting)]
        answer(1, ["-m", "ptdmpi", "train", "jobs/demo.toml", *words])
    return folder


def train_on(base: Path, data: Path, steps: int, name: str, *settings: str) -> Path:
    """Train a pretrained model further, and return its run directory. The model is trained on one
    rank, so that no matrix is divided before it is quantized."""
    folder = WORK / f"{base.name}-{name}"
    tree = {
        "run": {"steps": steps},
        "model": {**smol.sizes(base), "seq_length": LENGTH},
        "precision": {"compute": "bf16"},
        "batch": {"global_size": BATCH, "micro_size": BATCH},
        "optimizer": {"learning_rate": RATE, "warmup_steps": steps // 10},
        "data": {"train": [{"path": str(data / "train")}]},
        "checkpoint": {"initial": str(base), "every_minutes": 0.0},
    }
    smol.train(folder, 1, tree, settings)
    return folder


def quantized(
    model: Path, data: Path, form: str, method: str, *, more: Sequence[str]
) -> dict[str, Any]:
    """Quantize a model to the codes and block size `form` by the method `method`, unless its report
    exists already. Return the report of `ptdmpi quantize`, with perplexities in bf16. `more` are
    the command's options for the calibration samples of GPTQ."""
    target = WORK / f"{model.name}-{form.replace(', ', '-')}-{method}"
    known = target.with_suffix(".json")
    if not known.is_file():
        words = [*FORMS[form], "--method", method, "--evaluate", str(data / "valid"), "--json"]
        words += ["--precision", "bf16"]
        if method == "gptq":
            words += ["--data", str(data / "train"), *more]
        text = answer(1, ["-m", "ptdmpi", "quantize", str(model), str(target), *words])
        known.write_text(text[text.index("{") :])
    return json.loads(known.read_text())


def rows(model: Path, data: Path, more: Sequence[str]) -> Iterator[list[str]]:
    """Yield a row of the table of perplexities for each number format and each method of
    quantization."""
    for form in FORMS:
        for method in METHODS:
            report = quantized(model, data, form, method, more=more)
            (perplexity,) = report["perplexity"]
            yield [
                form,
                method,
                f"{report['bits_per_element']:.1f}",
                f"{report['bytes'] / 1e6:.1f}",
                f"{perplexity['before']:.3f}",
                f"{perplexity['after']:.3f}",
                f"{100 * (perplexity['after'] / perplexity['before'] - 1):+.2f} %",
            ]


def demo_on(base: Path, name: str, *settings: str) -> Path:
    """Train the demo's model further. Return its run directory."""
    further = ["optimizer.learning_rate=1e-3", "optimizer.warmup_steps=20"]
    return train(name, MORE_STEPS, *further, f"checkpoint.initial={base}", *settings)


def after_training(
    base: Path, trained: Callable[..., Path], data: Path, more: Sequence[str]
) -> Iterator[list[str]]:
    """Yield the rows of a table with two perplexities, in bf16 and in int4. There are rows for
    three models: the model `base`, `base` after further training, and `base` after further training
    in which each matrix multiplication rounds the weights to int4. `trained` is a function that
    trains `base` further and returns the run directory."""
    models = {
        "none": base,
        "without rounded weights": trained("plain"),
        'with `quantize.weights = "int4"`': trained("aware", "quantize.weights=int4"),
    }
    for title, model in models.items():
        for method in METHODS:
            (perplexity,) = quantized(model, data, "int4, 64", method, more=more)["perplexity"]
            values = [f"{perplexity[when]:.3f}" for when in ("before", "after")]
            yield [title, method, *values]


HEAD = (
    "codes, block",
    "method",
    "bits per element",
    "MB",
    "perplexity in bf16",
    "quantized",
    "increase",
)


def main() -> None:
    """Quantize the model, train it further and quantize it again, and write the tables of
    perplexities."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, nargs="?", help="default: the demo's, trained here")
    parser.add_argument("data", type=Path, nargs="?", default=DATA, help="its shards")
    parser.add_argument("--mark", default="demo", help="the mark of the tables in the page")
    parser.add_argument("--samples", default="128", help="sequences of GPTQ's calibration")
    parser.add_argument("--length", help="tokens of a sequence")
    parser.add_argument("--further", action="store_true", help="only the further training")
    options = parser.parse_args()
    if not (options.data / "valid").is_dir():
        sys.exit(f"{options.data} has no valid/: `make demo` makes the demo's shards")
    WORK.mkdir(parents=True, exist_ok=True)
    more = ["--samples", options.samples]
    if options.length:
        more += ["--length", options.length]
    if options.model:
        model = options.model
        steps = PRETRAINED_STEPS
        further = partial(train_on, model, options.data, steps)
    else:
        model = train("demo", STEPS)
        steps = MORE_STEPS
        further = partial(demo_on, model)
    if not options.further:
        put(PAGE, options.mark, list(table(HEAD, rows(model, options.data, more))))
    head = (
        f"further training of {steps} steps",
        "method",
        "perplexity in bf16",
        "perplexity in int4",
    )
    lines = table(head, after_training(model, further, options.data, more))
    put(PAGE, f"{options.mark}-aware", list(lines))


if __name__ == "__main__":
    main()
