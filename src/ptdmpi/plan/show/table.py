"""The prices of layouts (predicted time and memory), as JSON for programs and as text for
people."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from ptdmpi.base.traffic import KINDS
from ptdmpi.base.words import counted, short
from ptdmpi.config.zero import covers_state
from ptdmpi.plan.cost.price import Price, Pricer
from ptdmpi.plan.cost.relief import size
from ptdmpi.plan.cost.traffic import StepTraffic

DAY_S = 86400
HOUR_S = 3600
PARTS = {
    "compute": "computing",
    "tensor": "tensor axis",
    "context": "context axis",
    "expert": "to experts",
    "pipeline": "between stages",
    "bubble": "bubble",
    "data": "data axis",
    "optimizer": "optimizer",
}

KIND_WORDS = {kind: kind.replace("_", "-").removesuffix("s") for kind in KINDS}
LEGEND = (
    "t tensor, {c}{e}{et}p pipeline, d data ranks, v chunks per pipeline rank, "
    "b sequences per microbatch",
    "TFLOP/s (per rank) and MFU without recomputation; bubble: idle over working time, all ranks;",
    "comm: messages that do not overlap with computation, as a share of the step;",
    "memory: of the rank that needs the most",
)


def numbers(price: Price, pricer: Pricer, tokens: float | None) -> dict[str, Any]:
    """Return the entry of a layout in the JSON that `ptdmpi plan --json` prints. `tokens` is the
    number of tokens of the whole training. If `tokens` is not None, the entry also has the days and
    the rank-hours of the training."""
    layout = price.layout
    entry: dict[str, Any] = {
        "layout": str(layout),
        "schedule": layout.schedule,
        "recompute": layout.recompute,
        "recompute_layers": layout.recompute_layers,
        "sequence_parallel": layout.sequence_parallel,
        "scatter_gather": layout.scatter_gather,
        "partition_activations": layout.partition_activations,
        "first_layers": layout.first_layers,
        "zero": layout.zero,
        "shard_group": "all" if layout.shard_group is None else layout.shard_group,
        "shards": layout.shards,
        "offload": layout.offload,
        "dp_overlap": layout.dp_overlap,
        "microbatches": layout.microbatches(pricer.batch),
        "step_time_s": price.step_time_s,
        "model_tflops_per_rank": price.model_tflops_per_rank,
        "hardware_tflops_per_rank": price.hardware_tflops_per_rank,
        "mfu": price.mfu,
        "bubble_fraction": price.bubble_fraction,
        "communication_fraction": price.communication_fraction,
        "step_parts_s": parts_s(price),
        "peak_memory_bytes": price.memory.total,
        "memory_bytes": price.memory.parts,
        "host_memory_bytes": price.memory.host,
        "capacity_bytes": price.capacity_bytes,
        "fits": price.fits,
    }
    if layout.context > 1:
        entry["context_method"] = layout.context_method
        entry["sent"] = _sent(price, pricer)
    if tokens is not None:
        steps = tokens / (pricer.batch * pricer.model.config.seq_length)
        entry["days"] = steps * price.step_time_s / DAY_S
        entry["rank_hours"] = steps * price.step_time_s * layout.ranks / HOUR_S
    return entry


def parts_s(price: Price) -> dict[str, float]:
    """Return the seconds that each kind of work takes in a step, as a dict with the keys of PARTS.
    The keys "context" and "expert" are included only if the layout cuts sequences or distributes
    experts."""
    parts = asdict(price.parts)
    for axis in ("context", "expert"):
        if getattr(price.layout, axis) == 1:
            del parts[axis]
    return parts


def _sent(price: Price, pricer: Pricer) -> dict[str, dict[str, dict[str, int]]]:
    """Return the messages that rank 0 sends in a step, computed from the closed forms of
    `StepTraffic`. The result maps group of ranks -> kind of message -> {"messages": number of
    messages, "bytes": total size}."""
    step = StepTraffic(
        pricer.model,
        price.layout,
        pricer.batch,
        pricer.machine.dtype,
        method=pricer.times.method,
    )
    return step.of(rank=0).by_kind


def settings(entry: dict[str, Any]) -> str:
    """Return the settings of a layout in a few words, without the sizes of its axes. `entry` is a
    result of `numbers`."""
    words = [entry["schedule"], f"recompute {entry['recompute']}"]
    if entry["recompute_layers"] is not None:
        words[-1] += f" of {counted(entry['recompute_layers'], 'layer')}"
    if entry["partition_activations"]:
        words.append("partitioned")
    if entry["sequence_parallel"]:
        words.append("sequence parallel")
    if entry["first_layers"] is not None:
        words.append(f"{counted(entry['first_layers'], 'layer')} in the first stage")
    if not entry["scatter_gather"]:
        words.append("no scatter/gather")
    if covers_state(entry["zero"]):
        words.append(f"ZeRO {entry['zero']}")
        if entry["shard_group"] != "all":
            words[-1] += f" in groups of {entry['shard_group']}"
    if "context_method" in entry:
        words.append(f"context {entry['context_method']}")
    if entry["offload"] != "none":
        words.append(f"offload {entry['offload']}")
    if entry["dp_overlap"]:
        words.append("dp overlap")
    return ", ".join(words)


def lines(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield rows as lines of aligned columns: the first and the last column are aligned to the
    left, all other columns to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:-1], widths[1:-1], strict=True)]
        yield "  ".join([*cells, row[-1]]).rstrip()


def duration(seconds: float, of: float) -> str:
    """Return a time of `seconds` seconds as text. `of` is the total time of which it is a part, in
    seconds, and determines the unit: s from 1 s on, ms from 1 ms on, and otherwise us."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if of >= scale:
            return f"{seconds / scale:.3f} {unit}"
    return f"{seconds / 1e-6:.3f} us"


def tflops(number: float) -> str:
    """Return a number of TFLOP/s as text. Numbers below 1 have two significant digits, and all
    others have one decimal place."""
    if number < 1:
        return f"{number:.2g}"
    return f"{number:.1f}"


def overview(entries: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield the lines of the table that compares layouts, one line for each of `entries` (results
    of `numbers`)."""
    rows = [["layout", "step", "TFLOP/s", "MFU", "bubble", "comm", "memory", ""]]
    for entry in entries:
        note = "" if entry["fits"] else "  DOES NOT FIT"
        rows.append(
            [
                entry["layout"],
                duration(entry["step_time_s"], entries[0]["step_time_s"]),
                tflops(entry["model_tflops_per_rank"]),
                f"{entry['mfu']:.1%}",
                f"{entry['bubble_fraction']:.1%}",
                f"{entry['communication_fraction']:.1%}",
                size(entry["peak_memory_bytes"]),
                settings(entry) + note,
            ]
        )
    yield from lines(rows)


def _legend(entries: Sequence[dict[str, Any]]) -> list[str]:
    """Return the lines of text below the table that explain its columns and the letters in the
    layouts. The letters c, e and et are explained only if they occur in a layout."""
    words = {"c": "c context, ", "e": "e expert, ", "et": "et expert_tensor, "}
    for letter in words:
        if not any(f"{letter}=" in entry["layout"] for entry in entries):
            words[letter] = ""
    return [line.format(**words) for line in LEGEND]


def _details(entry: dict[str, Any]) -> Iterator[str]:
    """Yield lines of text with the parts of the step time and of the memory of one layout. `entry`
    is a result of `numbers`."""
    step_s = entry["step_time_s"]
    total = entry["peak_memory_bytes"]
    yield f"{entry['layout']}, {settings(entry)}"
    yield f"  a step of {duration(step_s, step_s)}, on the busiest rank"
    for key, seconds in entry["step_parts_s"].items():
        word = PARTS[key]
        yield f"  {word:<16}{duration(seconds, step_s):>12}  {seconds / step_s:>6.1%}"
    if "sent" in entry:
        yield "  rank 0 sends in a step"
        for group, text in sent_rows(entry["sent"]):
            yield f"  {group:<16}{text}"
    yield f"  memory {size(total)} of {size(entry['capacity_bytes'])} per rank"
    for key, amount in entry["memory_bytes"].items():
        yield f"  {key:<16}{size(amount):>14}"
    if entry["host_memory_bytes"]:
        yield f"  {'on the host':<16}{size(entry['host_memory_bytes']):>14}"
    hardware = entry["hardware_tflops_per_rank"]
    yield f"  with recomputation counted {tflops(hardware)} TFLOP/s per rank"
    if "days" in entry:
        yield f"  training takes {entry['days']:.1f} days, {entry['rank_hours']:,.0f} rank-hours"


def sent_rows(sent: dict[str, dict[str, dict[str, int]]]) -> Iterator[tuple[str, str]]:
    """Yield (name of the group, text) for each group of ranks in `sent`. The text lists the
    messages that a rank sends in this group in a step, by kind of message."""
    for group, kinds in sent.items():
        parts = (
            f"{size(numbers['bytes'])} in {counted(numbers['messages'], KIND_WORDS[kind])}"
            for kind, numbers in kinds.items()
        )
        yield group, ", ".join(parts)


def _why(why: dict[str, Any]) -> Iterator[str]:
    """Yield lines that explain why the given layout is not the best layout, and which changes would
    make it better."""
    entry = why["layout"]
    changes = why["changes"]
    yield ""
    yield from _details(entry)
    if not entry["fits"]:
        over = entry["peak_memory_bytes"] - entry["capacity_bytes"]
        yield f"  does not fit: {size(over)} too much per rank"
    most = why["largest_difference"]
    seconds = duration(abs(most["seconds"]), entry["step_time_s"])
    direction = "more" if most["seconds"] > 0 else "less"
    yield (
        f"  {why['slower_than_best']:+.1%} step time compared with the best layout; the largest "
        f"difference: {PARTS[most['part']]}, {seconds} {direction}"
    )
    yield ""
    if not changes:
        yield "no single change makes it faster"
        return
    if why["changes_at_once"] > 1:
        yield "the fastest layouts that fit after one or two changes"
    else:
        yield "the single changes that help most"
    rows = []
    for change in changes:
        rows.append(
            [
                f"  {change['change']}",
                duration(change["step_time_s"], entry["step_time_s"]),
                f"{change['step_time_s'] / entry['step_time_s'] - 1:+.1%}",
                size(change["peak_memory_bytes"]),
                "" if change["fits"] else "does not fit yet",
            ]
        )
    yield from lines(rows)


def _beside(result: dict[str, Any]) -> Iterator[str]:
    """Yield lines of text about the layout that the rules of Narayanan et al. 2021 choose, for
    comparison with the best layout."""
    model = result["microbatch_model"]
    ruled = result["heuristic"]
    yield "for comparison, the rules of thumb of the PTD-P paper (Narayanan et al. 2021)"
    if ruled is None:
        yield "  layout by the rules       no layout that follows them is legal and fits"
    else:
        step_s = result["layouts"][0]["step_time_s"]
        yield (
            f"  layout by the rules       {ruled['layout']}, {settings(ruled)}: "
            f"{duration(ruled['step_time_s'], step_s)} ({ruled['step_time_s'] / step_s - 1:+.1%})"
        )
    yield f"  best b by its formula     {model['b']} (by this search: {model['simulated_b']})"
    yield "rules (sections 3.2 to 3.4): as many tensor ranks as a node has, then the fewest"
    yield "pipeline ranks with which the model fits, then data ranks; full recomputation;"
    yield "formula (equation 1): a step takes (B / (d b) + p - 1) times the time of a microbatch"
    yield "in the slowest stage, for a batch of B sequences"


def _train(result: dict[str, Any]) -> Iterator[str]:
    """Yield the first layout as lines of a configuration file. Yield nothing if this layout does
    not fit into memory."""
    if not result["layouts"][0]["fits"]:
        return
    yield ""
    if result["train"] is None:
        yield (
            "ptdmpi train overlaps no messages over the data axis with computation: this layout is "
            "only a forecast"
        )
        return
    ranks = result["ranks"]
    yield f"to train in this layout: mpirun -n {ranks} ptdmpi train CONFIG, and in CONFIG"
    for section, keys in result["train"].items():
        values = ", ".join(f"{key} = {json.dumps(value)}" for key, value in keys.items())
        yield f"  {section} = {{ {values} }}"


def report(result: dict[str, Any]) -> str:
    """Return the text that `ptdmpi plan` prints."""
    ranks = counted(result["ranks"], "rank")
    size = f"{short(result['parameters'])} parameters"
    if result["active_parameters"] < result["parameters"]:  # the model has experts
        size += f" ({short(result['active_parameters'])} for each token)"
    text = [
        f"{result['model']}: {size}, {ranks} of "
        f"{result['cluster']}, {result['precision']}, "
        f"batch {result['batch']} of {result['seq_length']} tokens each",
        "",
        *overview(result["layouts"]),
        *_legend(result["layouts"]),
        "",
        *_details(result["layouts"][0]),
    ]
    if "why" in result:
        text += _why(result["why"])
    if "microbatch_model" in result:
        text += ["", *_beside(result)]
    return "\n".join([*text, *_train(result)])
