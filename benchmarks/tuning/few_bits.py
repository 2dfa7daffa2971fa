"""`python -m benchmarks.tuning.few_bits [MODEL DATA]`: what few bits cost a model, in perplexity.

Of the demo's model (jobs/demo.toml, `make demo` has made its shards), or of any MODEL with the
directory DATA of shards (`train` and `valid` in it): int8, int4, uint4 and nf4, rounded and by
GPTQ, and then after a further training with and without rounded weights. Writes the tables between
the marks of docs/how-to/quantization.md. What was trained or measured is not done again: it stands
in runs/few-bits.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.launch import ROOT, answer
from benchmarks.tuning import smol
from ptdmpi.base.disk import write_whole

PAGE = ROOT / "docs/how-to/quantization.md"
WORK, DATA = ROOT / "runs/few-bits", ROOT / "runs/demo-data"
SERIAL = ("tensor=1", "pipeline=1", "virtual=1")
STEPS, MORE_STEPS = 600, 200  # of the further training, at a quarter of the demo's rate
LENGTH, BATCH, RATE = 256, 2, 1e-4  # of a pretrained model's
FORMS = {  # codes and their block
    "int8, 64": ["--bits", "8"],
    "int4, 64": ["--bits", "4"],
    "int4, 32": ["--bits", "4", "--block", "32"],
    "uint4, 64": ["--bits", "4", "--asymmetric"],
    "uint4, 32": ["--bits", "4", "--asymmetric", "--block", "32"],
    "nf4, 64": ["--bits", "4", "--nf4"],
}
METHODS = ("absmax", "gptq")


def train(name: str, steps: int, *settings: str) -> Path:
    """A training of the demo's model on one rank; its run directory. One that was stopped goes
    on."""
    folder = WORK / name
    if not (folder / "checkpoints" / f"step-{steps:08d}").is_dir():
        given = [f"parallel.{one}" for one in SERIAL]
        given += [f"run.name={name}", f"run.dir={folder}", "checkpoint.resume=auto"]
        given += [f"run.steps={steps}", *settings]
        given += [f"data.valid={DATA / 'valid'}"]
        words = [word for one in given for word in ("--set", one)]
        answer(1, ["-m", "ptdmpi", "train", "jobs/demo.toml", *words])
    return folder


def train_on(base: Path, data: Path, steps: int, name: str, *settings: str) -> Path:
    """A further training of a pretrained model on one rank, which rounds each matrix for itself;
    its run directory."""
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
    model: Path, data: Path, form: str, method: str, more: Sequence[str]
) -> dict[str, Any]:
    """What `ptdmpi quantize` says, perplexities in bf16 among it."""
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
    """One for each form and method."""
    for form in FORMS:
        for method in METHODS:
            found = quantized(model, data, form, method, more)
            (one,) = found["perplexity"]
            yield [
                form,
                method,
                f"{found['bits_per_element']:.1f}",
                f"{found['bytes'] / 1e6:.1f}",
                f"{one['before']:.3f}",
                f"{one['after']:.3f}",
                f"{100 * (one['after'] / one['before'] - 1):+.2f} %",
            ]


def demo_on(base: Path, name: str, *settings: str) -> Path:
    """A further training of the demo's model."""
    further = ["optimizer.learning_rate=1e-3", "optimizer.warmup_steps=20"]
    return train(name, MORE_STEPS, *further, f"checkpoint.initial={base}", *settings)


def after_training(
    base: Path, trained: Callable[..., Path], data: Path, more: Sequence[str]
) -> Iterator[list[str]]:
    """As many steps more with rounded weights and without, then int4 of both, and of the base."""
    for title, model in (
        ("not trained on", base),
        ("without", trained("plain")),
        ('with `quantize.weights = "int4"`', trained("aware", "quantize.weights=int4")),
    ):
        for method in METHODS:
            (one,) = quantized(model, data, "int4, 64", method, more)["perplexity"]
            yield [title, method, f"{one['before']:.3f}", f"{one['after']:.3f}"]


def table(head: Sequence[str], lines: Iterator[list[str]]) -> Iterator[str]:
    """Markdown."""
    yield f"| {' | '.join(head)} |"
    yield "|" + "---|" * len(head)
    yield from (f"| {' | '.join(line)} |" for line in lines)


HEAD = ("codes, block", "method", "bits an element", "MB", "perplexity in bf16", "then", "more")


def written(mark: str, lines: list[str]) -> None:
    """Put the lines between the marks of the page."""
    begin, end = f"<!-- {mark} -->\n", f"<!-- end of {mark} -->\n"
    page = PAGE.read_text(encoding="utf-8")
    head, rest = page.split(begin)
    text = "\n".join([*lines, ""])
    write_whole(PAGE, head + begin + text + end + rest.split(end)[1])
    print(text)


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, nargs="?", help="default: the demo's, trained here")
    parser.add_argument("data", type=Path, nargs="?", default=DATA)
    parser.add_argument("--mark", default="demo", help="where in the page the table stands")
    parser.add_argument("--samples", default="128", help="of calibration")
    parser.add_argument("--length", help="their tokens")
    parser.add_argument("--steps", type=int, default=24, help="that a MODEL is trained on for")
    parser.add_argument("--further", action="store_true", help="the further training alone")
    given = parser.parse_args()
    if not (given.data / "valid").is_dir():
        sys.exit(f"{given.data} has no valid/: make demo makes that of the demo's model")
    WORK.mkdir(parents=True, exist_ok=True)
    more = ["--samples", given.samples]
    more += ["--length", given.length] if given.length else []
    model = given.model or train("demo", STEPS)
    if not given.further:
        written(given.mark, list(table(HEAD, rows(model, given.data, more))))
    steps = given.steps if given.model else MORE_STEPS
    on = partial(train_on, model, given.data, steps) if given.model else partial(demo_on, model)
    head = (f"{steps} steps more", "method", "perplexity in bf16", "then, in int4")
    written(f"{given.mark}-aware", list(table(head, after_training(model, on, given.data, more))))


if __name__ == "__main__":
    main()
