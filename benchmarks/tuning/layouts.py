"""`python -m benchmarks.tuning.layouts MODEL [FOLDER]`: LoRA in five layouts, and by `peft`.

A pretrained model is tuned in each layout, and by `peft`, from the same initial adapters, on the
same data, in float32 with one thread per rank. The module `smol` says what MODEL may be. The
benchmark writes two results into docs/how-to/fine-tuning.md. The first result is a table: for each
layout, the losses of the first and of the last step, and the greatest relative difference from the
losses on one rank. The second result is the greatest difference between the logits of the merged
model and the logits of the base model with separate adapters. The benchmark takes about ten minutes
for SmolLM2-135M on two cores.
"""

import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import marks
from benchmarks.launch import answer
from benchmarks.tuning import smol

STEPS = 20
LENGTH = 128
BATCH = 2


def layouts(base: Path) -> tuple[tuple[int, int, int], ...]:
    """Return the layout of each training run, as its numbers of tensor, pipeline and data ranks.
    Layouts with tensor parallelism have as many tensor ranks as the smallest divisor above 1 of the
    number of key-value heads (3 for SmolLM2-135M)."""
    model = smol.sizes(base)
    t = next(n for n in range(2, 1 + model["heads"]) if model["kv_heads"] % n == 0)
    return (1, 1, 1), (t, 1, 1), (1, 2, 1), (1, 1, 2), (t, 2, 1)


def begin(base: Path) -> Path:
    """Let `peft` initialize adapters for the model `base`, and return their checkpoint in ptdmpi's
    format."""
    work = base.parent
    theirs = work / "peft-begin"
    ours = work / "begin"
    if not ours.is_dir():
        shutil.rmtree(theirs, ignore_errors=True)
        numbers = [str(smol.LORA["rank"]), str(smol.LORA["alpha"])]
        words = ["begin", str(work / "unpacked"), str(theirs), *numbers]
        answer(1, ["-m", "benchmarks.tuning.theirs", *words])
        answer(1, ["-m", "ptdmpi", "adapter", "import", *map(str, (theirs, base, ours))])
    return ours


def trained(base: Path, axes: Sequence[int], steps: int, length: int) -> tuple[Path, list[float]]:
    """Train in the layout with the numbers `axes` of tensor, pipeline and data ranks, unless its
    run is already complete. Return the run directory and the losses."""
    tensor, pipeline, data = axes
    tree = smol.configuration(
        base,
        length,
        {
            "run": {"steps": steps},
            "parallel": {"tensor": tensor, "pipeline": pipeline, "data": data},
            "batch": {"global_size": BATCH, "micro_size": 1},
            "adapt": {**smol.LORA, "base": str(base)},
            "optimizer": {"learning_rate": 1e-3, "warmup_steps": 2},
            "checkpoint": {"initial": str(begin(base))},
            "log": {"validate_samples": 1},
        },
    )
    folder = base.parent / "layouts" / "".join(map(str, axes))
    records = smol.train(folder, tensor * pipeline * data, tree)
    return folder, [record["loss"] for record in records if "loss" in record]


def against_peft(base: Path, run: Path) -> dict[str, Any]:
    """Compare the run on one rank with a training by `peft` (`benchmarks.tuning.theirs`), and
    return the differences."""
    merged = base.parent / "layouts" / "merged"
    if not merged.is_dir():
        answer(1, ["-m", "ptdmpi", "adapter", "merge", *map(str, (base, run, merged))])
    paths = (run, base.parent / "unpacked", base.parent / "peft-begin", merged)
    text = answer(1, ["-m", "benchmarks.tuning.theirs", "train", *map(str, paths)])
    comparison: dict[str, Any] = json.loads(text[text.index("{") :])
    return comparison


def measured(base: Path, chosen: Sequence[Sequence[int]], steps: int, length: int) -> Any:
    """Return the losses for each layout, and the comparison of the first layout with `peft`."""
    runs = [trained(base, axes, steps, length) for axes in chosen]
    return [losses for _, losses in runs], against_peft(base, runs[0][0])


def greatest(losses: Sequence[float], plain: Sequence[float]) -> float:
    """Return the greatest relative difference between two loss curves, step by step. Differences
    are relative to the losses `plain`."""
    return max(abs(a - b) / abs(b) for a, b in zip(losses, plain, strict=True))


def table(chosen: Sequence[Sequence[int]], curves: Any, peft: dict[str, Any]) -> list[str]:
    """Return the lines of the results in Markdown: a table of the losses `curves` of the layouts
    `chosen`, and a paragraph about the differences of logits in `peft`."""
    names = [", ".join(map(str, axes)) for axes in chosen]
    rows = []
    for name, losses in zip(names, curves, strict=True):
        difference = f"{greatest(losses, curves[0]):.1e}" if losses is not curves[0] else ""
        rows.append([name, f"{losses[0]:.6f}", f"{losses[-1]:.6f}", difference])
    theirs = peft["losses"]
    difference = f"{greatest(theirs, curves[0]):.1e}"
    rows.append(["`peft`, one process", f"{theirs[0]:.6f}", f"{theirs[-1]:.6f}", difference])
    head = ["t, p, d", "loss of step 1", "loss of the last step", "largest relative difference"]
    merged = peft["merged"]
    logits = (
        "The logits differ by the following amounts, relative to the largest logit. Merged "
        f"adapters differ from adapters with their base by {merged['fp32']:.1e} in float32 and by "
        f"{merged['fp64']:.1e} in float64. Adapters with their base differ between float32 and "
        f"float64 by {peft['rounding']:.1e}. After the training steps, ptdmpi differs from `peft` "
        f"by {peft['theirs']:.1e}."
    )
    return [*marks.table(head, rows), "", logits]


def main(source: Path, work: Path = smol.WORK) -> None:
    """Tune the model in all layouts and by `peft`, and write the results into the page."""
    base = smol.prepare(source, work)
    chosen = layouts(base)
    curves, peft = measured(base, chosen, STEPS, LENGTH)
    smol.put("layouts", table(chosen, curves, peft))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
