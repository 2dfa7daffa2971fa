"""A preview for the eye."""

from typing import Any

from ptdmpi.base.words import counted, file_size, short
from ptdmpi.plan.cost.relief import size
from ptdmpi.report.live import duration


def words(found: dict[str, Any]) -> str:
    """Line by line; what keeps the run from its start is said elsewhere."""
    memory, times, checkpoint = found["memory"], found["time"], found["checkpoint"]
    rows = [
        ("run", f"{found['run']} in {found['directory']}: {found['resume']['says']}"),
        ("ranks", f"{found['ranks']} ({found['ranks_from']})"),
        ("layout", f"{found['layout']}; {found['precision']}"),
        (
            "model",
            f"{short(found['parameters'])} parameters, vocabulary {found['vocab_size']:,}",
        ),
        (
            "length",
            f"{counted(found['steps'], 'step')} of {found['tokens_per_step']:,} tokens, "
            f"{found['tokens']:,} in all",
        ),
    ]
    rows += [("", line) for line in found["base"]]
    rows += [
        (
            "data",
            f"{one['path']}: {one['drawn']:,} of {one['samples']:,} samples, "
            f"{one['epochs']:.3g} epochs",
        )
        for one in found["train"]
    ]
    rows += [
        ("validation", f"{one['path']}: {counted(one['samples'], 'sample')}")
        for one in found["valid"]
    ]
    paths = dict.fromkeys(one["path"] for one in (*found["train"], *found["valid"]))
    checked = f"opened, but not read through: ptdmpi-data verify {' '.join(paths)} does"
    rows.append(("", "; ".join(found["told"]) or checked))  # files of a task are read whole
    has = "" if memory["capacity_bytes"] is None else f" of {size(memory['capacity_bytes'])}"
    parts = ", ".join(f"{name} {size(part)}" for name, part in memory["parts_bytes"].items())
    rows.append(("memory", f"{size(memory['bytes'])} a rank{has} ({memory['capacity_from']})"))
    rows.append(("", parts))
    step_s = times["step_s"]
    said = "" if step_s is None else f"{duration(step_s)} a step, {duration(times['total_s'])} for "
    said += "" if step_s is None else f"{counted(times['steps'], 'step')}, "
    rows.append(("time", f"{said}{times['from']}"))
    steps, minutes = checkpoint["every_steps"], checkpoint["every_minutes"]
    when = [f"every {counted(steps, 'step')}"] if steps else []
    when += [f"every {minutes:g} minutes"] if minutes else []
    often = " and ".join([*when, "at the end"])
    rows.append(("checkpoint", f"{file_size(checkpoint['bytes'])}, {often}"))
    lines = [f"{name:<12}{value}" for name, value in rows] + found["warnings"]
    return "\n".join([*lines, "", *_batch(found["batch"])])


def _batch(batch: dict[str, Any]) -> list[str]:
    lines = [f"the batch of step {batch['step']:,} begins with"]
    if batch["no_text"]:
        lines.append(f"  (ids alone: {batch['no_text']})")
    for one in batch["samples"]:
        lines.append(f"  sample {one['sample']:,} of {one['dataset']}, ids {one['ids']} ...")
        if one["text"] is not None:
            lines += [f"  | {line}" for line in one["text"].splitlines()[:8]]
    return lines
