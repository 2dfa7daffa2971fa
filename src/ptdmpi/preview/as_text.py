"""The preview of a run, as lines of text."""

import shlex
from typing import Any

from ptdmpi.base.words import counted, file_size, short
from ptdmpi.plan.cost.relief import size
from ptdmpi.plan.show.table import sent_rows
from ptdmpi.report.live import duration

LINES = 8  # maximum number of lines that are shown of a sample's text


def as_text(forecast: dict[str, Any]) -> str:
    """Return `forecast`, a result of `preview`, as text. The entry "mistake" of the preview is left
    out, because the caller prints it."""
    rows = [
        *_run_rows(forecast),
        *_data_rows(forecast),
        *_memory_rows(forecast["memory"]),
        *_sent_rows(forecast["sent"]),
        ("time", _time(forecast["time"])),
        ("checkpoint", _checkpoint(forecast["checkpoint"])),
    ]
    lines = [f"{name:<12}{value}" for name, value in rows]
    return "\n".join([*lines, *forecast["warnings"], "", *_batch(forecast["batch"])])


def _run_rows(forecast: dict[str, Any]) -> list[tuple[str, str]]:
    run = f"{forecast['run']} in {forecast['directory']}: {forecast['resume']['says']}"
    model = f"{short(forecast['parameters'])} parameters, vocabulary {forecast['vocab_size']:,}"
    length = (
        f"{counted(forecast['steps'], 'step')} of {forecast['tokens_per_step']:,} tokens, "
        f"{forecast['tokens']:,} in all"
    )
    return [
        ("run", run),
        ("ranks", f"{forecast['ranks']} ({forecast['ranks_from']})"),
        ("layout", f"{forecast['layout']}; {forecast['precision']}"),
        ("model", model),
        *_named("experts", forecast["experts"]),
        ("length", length),
        *(("", line) for line in forecast["base"]),
    ]


def _named(name: str, lines: list[str]) -> list[tuple[str, str]]:
    """Return a table row for each line. Only the first row has the name."""
    return [("" if number else name, line) for number, line in enumerate(lines)]


def _data_rows(forecast: dict[str, Any]) -> list[tuple[str, str]]:
    rows = []
    for dataset in forecast["train"]:
        text = (
            f"{dataset['path']}: {dataset['drawn']:,} of {dataset['samples']:,} samples, "
            f"{dataset['epochs']:.3g} epochs"
        )
        rows.append(("data", text))
    for dataset in forecast["valid"]:
        text = f"{dataset['path']}: {counted(dataset['samples'], 'sample')}"
        rows.append(("validation", text))
    paths = dict.fromkeys(dataset["path"] for dataset in (*forecast["train"], *forecast["valid"]))
    commands = " && ".join(f"ptdmpi-data verify {shlex.quote(path)}" for path in paths)
    not_read = f"opened, but not read through; to do that: {commands}"
    # If there are remarks about the data (the entry "told"), show them and not `not_read`. For
    # example, the files of a labelled task have remarks, because they were read completely.
    rows.append(("", "; ".join(forecast["told"]) or not_read))
    return rows


def _memory_rows(memory: dict[str, Any]) -> list[tuple[str, str]]:
    needed = f"{size(memory['bytes'])} a rank"
    if memory["capacity_bytes"] is None:
        needed += f"; the memory that a rank has is {memory['capacity_from']}"
    else:
        needed += f" of {size(memory['capacity_bytes'])} ({memory['capacity_from']})"
    parts = ", ".join(f"{name} {size(part)}" for name, part in memory["parts_bytes"].items())
    rows = [("memory", needed), ("", parts)]
    if memory["host_bytes"]:
        rows.append(("", f"and {size(memory['host_bytes'])} a rank on the host"))
    return rows


def _sent_rows(sent: dict[str, Any]) -> list[tuple[str, str]]:
    """Return table rows about the messages that rank 0 sends, one row for each group of ranks."""
    about = "" if sent["is_exact"] else "about "
    texts = [f"{group}: {about}{text}" for group, text in sent_rows(sent["traffic"])]
    if not texts:
        return []
    return [("messages", "rank 0 sends in a step"), *(("", text) for text in texts)]


def _time(times: dict[str, Any]) -> str:
    if times["step_s"] is None:
        return f"{times['from']}"
    step = duration(times["step_s"])
    total = duration(times["total_s"])
    return f"{step} a step, {total} for {counted(times['steps'], 'step')}, {times['from']}"


def _checkpoint(checkpoint: dict[str, Any]) -> str:
    moments = []
    if checkpoint["every_steps"]:
        moments.append(f"every {counted(checkpoint['every_steps'], 'step')}")
    if checkpoint["every_minutes"]:
        moments.append(f"every {checkpoint['every_minutes']:g} minutes")
    moments.append("at the end")
    return f"{file_size(checkpoint['bytes'])}, {' and '.join(moments)}"


def _batch(batch: dict[str, Any]) -> list[str]:
    """Return lines that show the first samples of the first batch."""
    lines = [f"the batch of step {batch['step']:,} begins with"]
    if batch["no_text"]:
        lines.append(f"  (ids alone: {batch['no_text']})")
    for sample in batch["samples"]:
        number = f"{sample['sample']:,}"
        lines.append(f"  sample {number} of {sample['dataset']}, ids {sample['ids']} ...")
        if sample["text"] is not None:
            lines += [f"  | {line}" for line in sample["text"].splitlines()[:LINES]]
    return lines
