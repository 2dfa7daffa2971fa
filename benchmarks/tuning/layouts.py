"""`python -m benchmarks.tuning.layouts MODEL [FOLDER]`: LoRA in five layouts, and by `peft`.

A pretrained model is tuned from the same adapters, on the same data, by each of them.
MODEL: see `smol`. Writes between the marks of docs/how-to/fine-tuning.md the first and the last
loss and of the greatest relative difference to one rank's over all steps; and how far merged
adapters' logits are from those beside the base. Float32, one thread a rank; of SmolLM2-135M some
ten minutes on two cores.
"""

import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.launch import answer
from benchmarks.tuning import smol

STEPS, LENGTH, BATCH = 20, 128, 2


def layouts(base: Path) -> tuple[tuple[int, int, int], ...]:
    """(t, p, d) of the trainings; t is 2, or the next number that divides the model's heads (of
    SmolLM2-135M 3)."""
    model = smol.sizes(base)
    t = next(n for n in range(2, 1 + model["heads"]) if model["kv_heads"] % n == 0)
    return (1, 1, 1), (t, 1, 1), (1, 2, 1), (1, 1, 2), (t, 2, 1)


def begin(base: Path) -> Path:
    """Adapters that `peft` has drawn, as a checkpoint of ours."""
    work = base.parent
    theirs, ours = work / "peft-begin", work / "begin"
    if not ours.is_dir():
        shutil.rmtree(theirs, ignore_errors=True)
        numbers = [str(smol.LORA["rank"]), str(smol.LORA["alpha"])]
        words = ["begin", str(work / "unpacked"), str(theirs), *numbers]
        answer(1, ["-m", "benchmarks.tuning.theirs", *words])
        answer(1, ["-m", "ptdmpi", "adapter", "import", *map(str, (theirs, base, ours))])
    return ours


def trained(base: Path, axes: Sequence[int], steps: int, length: int) -> tuple[Path, list[float]]:
    """The run directory and the losses of a layout."""
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
    return folder, [one["loss"] for one in records if "loss" in one]


def beside_peft(base: Path, run: Path) -> dict[str, Any]:
    """What `theirs` finds of the run on one rank."""
    merged = base.parent / "layouts" / "merged"
    if not merged.is_dir():
        answer(1, ["-m", "ptdmpi", "adapter", "merge", *map(str, (base, run, merged))])
    paths = (run, base.parent / "unpacked", base.parent / "peft-begin", merged)
    text = answer(1, ["-m", "benchmarks.tuning.theirs", "train", *map(str, paths)])
    found: dict[str, Any] = json.loads(text[text.index("{") :])
    return found


def measured(base: Path, chosen: Sequence[Sequence[int]], steps: int, length: int) -> Any:
    """Losses of each layout, then what `theirs` finds of the first one."""
    runs = [trained(base, axes, steps, length) for axes in chosen]
    return [losses for _, losses in runs], beside_peft(base, runs[0][0])


def greatest(losses: Sequence[float], plain: Sequence[float]) -> float:
    """The greatest relative difference of two curves."""
    return max(abs(a - b) / abs(b) for a, b in zip(losses, plain, strict=True))


def table(chosen: Sequence[Sequence[int]], curves: Any, peft: dict[str, Any]) -> list[str]:
    """Markdown."""
    lines = ["| t, p, d | loss of step 1 | of the last | greatest relative difference |"]
    lines.append("|---|---|---|---|")
    named = [(", ".join(map(str, axes)), one) for axes, one in zip(chosen, curves, strict=True)]
    for name, one in [*named, ("`peft`, one process", peft["losses"])]:
        told = f"{greatest(one, curves[0]):.1e}" if one is not curves[0] else ""
        lines.append(f"| {name} | {one[0]:.6f} | {one[-1]:.6f} | {told} |")
    merged, rounding = peft["merged"], peft["rounding"]
    told = (
        "How far logits are apart, of the greatest one: of merged adapters and of those beside the "
        f"base {merged['fp32']:.1e} in float32 and {merged['fp64']:.1e} in float64; of float32 and "
        f"float64 beside the base {rounding:.1e}; of ours and `peft`'s after their steps "
        f"{peft['theirs']:.1e}."
    )
    lines += ["", told]
    return lines


def main(source: Path, work: Path = smol.WORK) -> None:
    base = smol.prepare(source, work)
    chosen = layouts(base)
    curves, peft = measured(base, chosen, STEPS, LENGTH)
    smol.put("layouts", table(chosen, curves, peft))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
