"""`python -m benchmarks.tuning.lora_full MODEL [FOLDER]`: LoRA against full tuning.

MODEL: see `smol`; the task is that of `one_line`, in bfloat16 on two data ranks. Writes its results
between the marks of docs/how-to/fine-tuning.md and draws docs/pictures/lora-full.png. It keeps
trained runs in FOLDER, and does not repeat them.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.launch import ROOT, answer
from benchmarks.tuning import smol
from ptdmpi.config import AdaptConfig, Layout, ModelConfig
from ptdmpi.plan.cost.memory import Footprint, MemoryModel

PICTURE = ROOT / "docs/pictures/lora-full.png"
STEPS, LENGTH, BATCH, VALIDATED, ROUNDS = 32, 128, 4, 24, 4
RATES = {"full": 1e-4, "lora": 1e-3}
ADAPT: dict[str, dict[str, Any]] = {"full": {}, "lora": smol.LORA}
# (tokens of a row, rows of a microbatch) of the table of memory; with recomputation: measured
SETTINGS = [(256, 1), (1024, 1), (2048, 1), (4096, 1), (8192, 1)]
MEASURED = [(256, 1, "none"), (1024, 1, "none"), (1024, 1, "full")]
MIB, BAR = 2**20, 0.45


def trained(base: Path, method: str) -> list[Any]:
    """The records of one training."""
    tree = smol.configuration(
        base,
        LENGTH,
        {
            "run": {"steps": STEPS},
            "parallel": {"data": 2},
            "precision": {"compute": "bf16"},
            "batch": {"global_size": BATCH, "micro_size": 1},
            "optimizer": {"learning_rate": RATES[method], "warmup_steps": 4},
            "log": {"validate_every_steps": STEPS // 4, "validate_samples": VALIDATED},
        },
    )
    if method == "lora":
        tree["adapt"] = {**smol.LORA, "base": str(base)}
    else:
        tree["checkpoint"]["initial"] = str(base)
    return smol.train(base.parent / f"tuned-{method}", 2, tree)


def untuned(base: Path) -> float:
    """The held-out loss of the base: that of a run whose one step changes nothing."""
    tree = smol.configuration(
        base,
        LENGTH,
        {
            "run": {"steps": 1},
            "parallel": {"data": 2},
            "precision": {"compute": "bf16"},
            "adapt": {**smol.LORA, "base": str(base)},
            "batch": {"global_size": BATCH, "micro_size": 1},
            "optimizer": {"learning_rate": 1e-12},
            "log": {"validate_samples": VALIDATED},
        },
    )
    return validations(smol.train(base.parent / "untuned", 2, tree))[-1][1]


def validations(records: Sequence[Any]) -> list[tuple[int, float]]:
    return [(one["step"], one["validation_loss"]) for one in records if "validation_loss" in one]


def planned(base: Path, method: str, length: int, micro: int, recompute: str) -> Footprint:
    """What one rank needs in bfloat16, as plan and guard have it."""
    adapt = AdaptConfig(**ADAPT[method])
    model = ModelConfig(**{**smol.sizes(base), "seq_length": length}).adapted(adapt)
    account = MemoryModel(model, model.vocab_size, "bf16")
    layout = Layout(1, 1, 1, micro_size=micro, recompute=recompute)
    return account.peak(layout, 0, 1)


def measured(base: Path, method: str, setting: tuple[int, int, str]) -> dict[str, Any]:
    """What `step` says of a setting's memory."""
    words = ["memory", str(base), method, *map(str, setting)]
    text = answer(1, ["-m", "benchmarks.tuning.step", *words])
    found: dict[str, Any] = json.loads(text[text.index("{") :])
    return found


def greatest_length(base: Path, recompute: str) -> int:
    """The most tokens of a microbatch of one row at which LoRA needs at most `BAR` of full's."""

    def ratio(length: int) -> float:
        lora, full = (planned(base, one, length, 1, recompute).total for one in ("lora", "full"))
        return lora / full

    below, above = 128, 2**17
    while above - below > 1:
        middle = (below + above) // 2
        below, above = (middle, above) if ratio(middle) <= BAR else (below, middle)
    return below


def row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def memory_lines(base: Path) -> Iterator[str]:
    """Planned memory by part and ratio, and what was measured."""
    yield row(["tokens", "recompute", "", "state", "activations", "working", "MiB", "LoRA / full"])
    yield "|---" * 8 + "|"
    for recompute in ("none", "full"):
        for length, micro in SETTINGS:
            of = {one: planned(base, one, length, micro, recompute) for one in ("full", "lora")}
            for name, one in of.items():
                share = f"{one.total / of['full'].total:.2f}" if name == "lora" else ""
                sizes = (one.standing, one.activations, one.working, one.total)
                cells = [f"{size / MIB:,.0f}" for size in sizes]
                first = [f"{length:,}", recompute] if name == "full" else ["", ""]
                yield row([*first, "LoRA" if name == "lora" else name, *cells, share])
    most = {mode: greatest_length(base, mode) for mode in ("none", "full")}
    yield ""
    yield (
        f"LoRA needs at most {BAR} of what full tuning needs up to {most['none']:,} tokens of a "
        f"microbatch, with full recomputation up to {most['full']:,}. Resident memory beyond what "
        "a process had before its model was built, over two steps of one microbatch:"
    )
    yield ""
    yield row(["tokens", "recompute", "", "planned MiB", "resident MiB", "LoRA / full, resident"])
    yield "|---" * 6 + "|"
    for setting in MEASURED:
        found = {one: measured(base, one, setting) for one in ("full", "lora")}
        for name, one in found.items():
            share = f"{one['peak'] / found['full']['peak']:.2f}" if name == "lora" else ""
            first = [f"{setting[0]:,}", setting[2]] if name == "full" else ["", ""]
            cells = [f"{one[key] / MIB:,.0f}" for key in ("total", "peak")]
            yield row([*first, "LoRA" if name == "lora" else name, *cells, share])
    yield ""


def file_sizes(base: Path) -> dict[str, int]:
    """Bytes: what of each is handed on, and the newest checkpoint with its optimizer."""
    work, found = base.parent, {}
    folder = work / "exported"
    if not folder.is_dir():
        words = ["adapter", "export", str(work / "tuned-lora"), str(folder)]
        answer(1, ["-m", "ptdmpi", *words])
    found["lora"] = (folder / "adapter_model.safetensors").stat().st_size
    found["full"] = sum(one.stat().st_size for one in (work / "unpacked").glob("*.safetensors"))
    for method in ("full", "lora"):
        files = (work / f"tuned-{method}" / "checkpoints").glob("step-*/*.safetensors")
        found[f"{method}, checkpoint"] = sum(one.stat().st_size for one in files)
    return found


def loss_lines(base: Path, curves: dict[str, list[Any]], first: float) -> Iterator[str]:
    """Held-out losses, sizes and time."""
    text = answer(
        1, ["-m", "benchmarks.tuning.step", "time", str(base), str(LENGTH), "1", str(ROUNDS)]
    )
    time = json.loads(text[text.index("{") :])["lora"]
    size = file_sizes(base)
    steps = [step for step, _ in validations(curves["full"])]
    yield row(["held-out loss after step", "0", *map(str, steps)])
    yield "|---" * (len(steps) + 2) + "|"
    for name, records in curves.items():
        told = f"{'LoRA' if name == 'lora' else name}, rate {RATES[name]:g}"
        yield row(
            [told, *(f"{one:.3f}" for one in (first, *(loss for _, loss in validations(records))))]
        )
    yield ""
    ratio, least, most = (1 / time[key] for key in ("ratio", "greatest", "least"))
    yield (
        f"A step of LoRA takes {ratio:.2f} ({least:.2f} to {most:.2f}) of full tuning's time, one "
        f"rank and thread, {ROUNDS} rounds in turn, on a machine that was not quiet. The adapter "
        f"as `peft` takes it has {size['lora'] / 1e6:.1f} MB, the whole model "
        f"{size['full'] / 1e6:.0f} MB; checkpoints with the optimizer's state "
        f"{size['lora, checkpoint'] / 1e6:.0f} and {size['full, checkpoint'] / 1e6:,.0f} MB."
    )
    yield ""


def picture(base: Path, curves: dict[str, list[Any]], first: float) -> None:
    """Losses over steps, and planned memory by part."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
    for color, (name, records) in zip(("C0", "C1"), curves.items(), strict=True):
        shown = "LoRA" if name == "lora" else name
        losses = [(one["step"], one["loss"]) for one in records if "loss" in one]
        left.plot(*zip(*losses, strict=True), color=color, lw=0.6, alpha=0.5)
        points = [(0, first), *validations(records)]
        left.plot(*zip(*points, strict=True), "o-", color=color, label=f"{shown}, held out")
    left.set(xlabel="step", ylabel="loss of answers (thin: training)")
    left.legend(fontsize=8)
    bars = [
        (f"{'LoRA' if method == 'lora' else method}\n{length:,}{mode}", method, length, recompute)
        for length, recompute, mode in (
            (256, "none", ""),
            (2048, "none", ""),
            (8192, "none", ""),
            (8192, "full", "\nrecomputed"),
        )
        for method in ("full", "lora")
    ]
    heights = [planned(base, method, length, 1, mode).parts for _, method, length, mode in bars]
    bottom = [0.0] * len(bars)
    for part in ("weights", "gradients", "optimizer", "activations", "working"):
        sizes = [one[part] / 2**30 for one in heights]
        right.bar(range(len(bars)), sizes, bottom=bottom, label=part)
        bottom = [a + b for a, b in zip(bottom, sizes, strict=True)]
    right.set_xticks(range(len(bars)), [name for name, *_ in bars], fontsize=7)
    right.set(ylabel="planned GiB, by tokens of a microbatch")
    right.legend(fontsize=8)
    figure.savefig(PICTURE, dpi=110)
    plt.close(figure)


def main(source: Path, work: Path = smol.WORK) -> None:
    base = smol.prepare(source, work)
    first = untuned(base)
    curves = {method: trained(base, method) for method in RATES}
    picture(base, curves, first)
    lines = [*loss_lines(base, curves, first), f"![curves](../pictures/{PICTURE.name})", ""]
    lines += memory_lines(base)
    smol.put("lora", lines)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
