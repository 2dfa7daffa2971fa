"""`python -m benchmarks.tuning.lora_full MODEL [FOLDER]`: LoRA compared with full tuning.

The module `smol` says what MODEL may be, and the module `one_line` makes the task. Both methods
train in bfloat16 on two data ranks. The results are written between marks in
docs/how-to/fine-tuning.md, and docs/pictures/lora-full.png is drawn. Training runs are kept in
FOLDER, and are not repeated.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.launch import ROOT, answer
from benchmarks.marks import table
from benchmarks.tuning import smol
from ptdmpi.config import AdaptConfig, Layout, ModelConfig
from ptdmpi.plan.cost.footprint import Footprint
from ptdmpi.plan.cost.memory import MemoryModel

PICTURE = ROOT / "docs/pictures/lora-full.png"
STEPS = 32
LENGTH = 128
BATCH = 4
VALIDATED = 24
ROUNDS = 4
METHODS = {"full": "full", "lora": "LoRA"}  # maps each method to its name in tables
RATES = {"full": 1e-4, "lora": 1e-3}
ADAPT: dict[str, dict[str, Any]] = {"full": {}, "lora": smol.LORA}
# LENGTHS: the numbers of tokens in the single row of a microbatch, for the table of planned memory.
# MEASURED: the pairs (tokens, recomputation) whose memory is also measured.
LENGTHS = [256, 1024, 2048, 4096, 8192]
MEASURED = [(256, "none"), (1024, "none"), (1024, "full")]
MIB = 2**20
BAR = 0.45  # the goal for the memory of LoRA, as a fraction of the memory of full tuning


def trained(base: Path, method: str) -> list[Any]:
    """Train the model with one method ("full" or "lora"), unless the run is already complete, and
    return the records of its metrics.jsonl."""
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
    """Return the held-out loss of the base model. The loss comes from a run of one step, whose
    learning rate is so small that the step changes practically nothing."""
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
    """Return the step and the loss of each validation in `records`."""
    return [
        (record["step"], record["validation_loss"])
        for record in records
        if "validation_loss" in record
    ]


def planned(base: Path, method: str, length: int, recompute: str) -> Footprint:
    """Return the planned memory of one rank in bfloat16, for training by `method` with microbatches
    of one row of `length` tokens."""
    adapt = AdaptConfig(**ADAPT[method])
    model = ModelConfig(**{**smol.sizes(base), "seq_length": length}).adapted(adapt)
    account = MemoryModel(model, model.vocab_size, "bf16")
    return account.peak(Layout(1, 1, 1, recompute=recompute), 0, 1)


def measured(base: Path, method: str, length: int, recompute: str) -> dict[str, Any]:
    """Return the memory of one rank, as `benchmarks.tuning.step` measures it, for training by
    `method` with microbatches of one row of `length` tokens."""
    words = ["memory", str(base), method, str(length), recompute]
    text = answer(1, ["-m", "benchmarks.tuning.step", *words])
    numbers: dict[str, Any] = json.loads(text[text.index("{") :])
    return numbers


def greatest_length(base: Path, recompute: str) -> int:
    """Return the greatest row length in tokens at which LoRA needs at most the fraction `BAR` of
    the memory of full tuning. A microbatch has one row."""

    def ratio(length: int) -> float:
        lora = planned(base, "lora", length, recompute).total
        return lora / planned(base, "full", length, recompute).total

    below = 128
    above = 2**17
    while above - below > 1:
        middle = (below + above) // 2
        if ratio(middle) <= BAR:
            below = middle
        else:
            above = middle
    return below


def memory_lines(base: Path) -> Iterator[str]:
    """Yield the lines of the tables of planned and of measured memory."""
    yield "The next table shows the planned memory of a rank in MiB, by tokens of a microbatch:"
    yield ""
    head = ["tokens", "recompute", "method", "state", "activations", "working"]
    head += ["total", "LoRA / full"]
    rows = []
    for recompute in ("none", "full"):
        for length in LENGTHS:
            full = planned(base, "full", length, recompute)
            lora = planned(base, "lora", length, recompute)
            rows.append([f"{length:,}", recompute, "full", *_planned_cells(full), ""])
            share = f"{lora.total / full.total:.2f}"
            rows.append(["", "", "LoRA", *_planned_cells(lora), share])
    yield from table(head, rows)
    most = {mode: greatest_length(base, mode) for mode in ("none", "full")}
    yield ""
    yield (
        f"LoRA needs at most {BAR} of the memory of full fine-tuning for up to {most['none']:,} "
        f"tokens in a microbatch, and with full recomputation for up to {most['full']:,} tokens. "
        "The next table shows the resident memory in two steps of one microbatch, minus the memory "
        "before the model was built:"
    )
    yield ""
    rows = []
    for length, recompute in MEASURED:
        numbers = {method: measured(base, method, length, recompute) for method in METHODS}
        share = numbers["lora"]["peak"] / numbers["full"]["peak"]
        rows.append([f"{length:,}", recompute, "full", *_measured_cells(numbers["full"]), ""])
        rows.append(["", "", "LoRA", *_measured_cells(numbers["lora"]), f"{share:.2f}"])
    head = ["tokens", "recompute", "method", "planned MiB", "resident MiB", "LoRA / full, resident"]
    yield from table(head, rows)
    yield ""


def _planned_cells(memory: Footprint) -> list[str]:
    sizes = (memory.standing, memory.activations, memory.working, memory.total)
    return [f"{size / MIB:,.0f}" for size in sizes]


def _measured_cells(numbers: dict[str, Any]) -> list[str]:
    return [f"{numbers[key] / MIB:,.0f}" for key in ("total", "peak")]


def file_sizes(base: Path) -> dict[str, int]:
    """Return the sizes in bytes of the exported adapter, of the model's Hugging Face files, and of
    the checkpoints with the optimizer's state."""
    work = base.parent
    sizes = {}
    folder = work / "exported"
    if not folder.is_dir():
        words = ["adapter", "export", str(work / "tuned-lora"), str(folder)]
        answer(1, ["-m", "ptdmpi", *words])
    sizes["lora"] = (folder / "adapter_model.safetensors").stat().st_size
    sizes["full"] = sum(file.stat().st_size for file in (work / "unpacked").glob("*.safetensors"))
    for method in METHODS:
        files = (work / f"tuned-{method}" / "checkpoints").glob("step-*/*.safetensors")
        sizes[f"{method}, checkpoint"] = sum(file.stat().st_size for file in files)
    return sizes


def loss_lines(base: Path, curves: dict[str, list[Any]], first: float) -> Iterator[str]:
    """Yield the lines of a table of held-out losses, and then a paragraph about the time of a step
    and the sizes of the files. `first` is the loss of the base model."""
    text = answer(1, ["-m", "benchmarks.tuning.step", "time", str(base), str(LENGTH), str(ROUNDS)])
    time = json.loads(text[text.index("{") :])["lora"]
    size = file_sizes(base)
    steps = [step for step, _ in validations(curves["full"])]
    rows = []
    for method, records in curves.items():
        losses = [first, *(loss for _, loss in validations(records))]
        title = f"{METHODS[method]}, rate {RATES[method]:g}"
        rows.append([title, *(f"{loss:.3f}" for loss in losses)])
    yield from table(["held-out loss after step", "0", *map(str, steps)], rows)
    yield ""
    ratio, least, most = (1 / time[key] for key in ("ratio", "greatest", "least"))
    yield (
        f"A step of LoRA takes {ratio:.2f} ({least:.2f} to {most:.2f}) of the time of a step of "
        f"full fine-tuning, on one rank and thread, in {ROUNDS} alternating rounds on a machine "
        f"with other load. The adapter in `peft`'s format has {size['lora'] / 1e6:.1f} MB, and the "
        f"complete model has {size['full'] / 1e6:.0f} MB. Checkpoints with the optimizer's state "
        f"have {size['lora, checkpoint'] / 1e6:.0f} MB (LoRA) and "
        f"{size['full, checkpoint'] / 1e6:,.0f} MB (full)."
    )
    yield ""


def picture(base: Path, curves: dict[str, list[Any]], first: float) -> None:
    """Plot the losses over the steps, and the planned memory by its use (weights, gradients,
    ...)."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
    for color, (method, records) in zip(("C0", "C1"), curves.items(), strict=True):
        losses = [(record["step"], record["loss"]) for record in records if "loss" in record]
        left.plot(*zip(*losses, strict=True), color=color, lw=0.6, alpha=0.5)
        points = [(0, first), *validations(records)]
        label = f"{METHODS[method]}, held out"
        left.plot(*zip(*points, strict=True), "o-", color=color, label=label)
    left.set(xlabel="step", ylabel="loss of answers (thin: training)")
    left.legend(fontsize=8)
    _draw_memory(right, base)
    figure.savefig(PICTURE, dpi=110)
    plt.close(figure)


def _draw_memory(axes: Any, base: Path) -> None:
    """Draw a bar of planned memory for each method, number of tokens and mode of recomputation."""
    names = []
    heights = []
    for length, recompute in ((256, "none"), (2048, "none"), (8192, "none"), (8192, "full")):
        suffix = "*" if recompute == "full" else ""
        for method, title in METHODS.items():
            names.append(f"{title}\n{length:,}{suffix}")
            heights.append(planned(base, method, length, recompute).parts)
    bottom = [0.0] * len(names)
    for part in ("weights", "gradients", "optimizer", "activations", "working"):
        sizes = [parts[part] / 2**30 for parts in heights]
        axes.bar(range(len(names)), sizes, bottom=bottom, label=part)
        bottom = [below + size for below, size in zip(bottom, sizes, strict=True)]
    axes.set_xticks(range(len(names)), names, fontsize=7)
    axes.set(ylabel="planned GiB, by tokens of a microbatch (*: recomputed)")
    axes.legend(fontsize=8)


def main(source: Path, work: Path = smol.WORK) -> None:
    """Tune the model by LoRA and by full tuning, write the results into the page, and draw the
    picture."""
    base = smol.prepare(source, work)
    first = untuned(base)
    curves = {method: trained(base, method) for method in RATES}
    picture(base, curves, first)
    lines = [*loss_lines(base, curves, first), f"![curves](../pictures/{PICTURE.name})", ""]
    lines += memory_lines(base)
    smol.put("lora", lines)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
