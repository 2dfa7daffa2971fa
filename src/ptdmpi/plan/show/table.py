"""Prices as numbers for programs and as text for people."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from ptdmpi.base.words import counted, short
from ptdmpi.config.zero import covers_state
from ptdmpi.plan.cost.price import Price, Pricer
from ptdmpi.plan.cost.relief import size

DAY_S, HOUR_S = 86400, 3600
PARTS = {
    "compute": "computing",
    "tensor": "tensor axis",
    "pipeline": "between stages",
    "bubble": "bubble",
    "data": "data axis",
    "optimizer": "optimizer",
}
MEMORY = ("weights", "gradients", "optimizer", "activations", "working", "runtime")


LEGEND = (
    "t tensor, p pipeline, d data ranks, v chunks per pipeline rank, b sequences per microbatch",
    "TFLOP/s: per rank, as MFU without recomputation; bubble: idle over working time, all ranks;",
    "comm: messages that nothing hides, share of the step; memory: of the fullest rank",
)


def numbers(price: Price, pricer: Pricer, tokens: float | None) -> dict[str, Any]:
    """One entry of the JSON; `tokens` of a whole training add its days and rank-hours."""
    layout = price.layout
    found: dict[str, Any] = {
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
        "step_parts_s": asdict(price.parts),
        "peak_memory_bytes": price.memory.total,
        "memory_bytes": price.memory.parts,
        "host_memory_bytes": price.memory.host,
        "capacity_bytes": price.capacity_bytes,
        "fits": price.fits,
    }
    if tokens is not None:
        steps = tokens / (pricer.batch * pricer.model.config.seq_length)
        found["days"] = steps * price.step_time_s / DAY_S
        found["rank_hours"] = steps * price.step_time_s * layout.ranks / HOUR_S
    return found


def settings(entry: dict[str, Any]) -> str:
    """What a layout does beside its sizes, in a few words."""
    layers = entry["recompute_layers"]
    some = "" if layers is None else f" of {counted(layers, 'layer')}"
    words = [entry["schedule"], f"recompute {entry['recompute']}{some}"]
    words += ["partitioned"] if entry["partition_activations"] else []
    words += ["sequence parallel"] if entry["sequence_parallel"] else []
    first = entry["first_layers"]
    words += [] if first is None else [f"{counted(first, 'layer')} in the first stage"]
    words += [] if entry["scatter_gather"] else ["no scatter/gather"]
    if covers_state(entry["zero"]):
        group = "" if entry["shard_group"] == "all" else f" in groups of {entry['shard_group']}"
        words.append(f"ZeRO {entry['zero']}{group}")
    words += [] if entry["offload"] == "none" else [f"offload {entry['offload']}"]
    words += ["dp overlap"] if entry["dp_overlap"] else []
    return ", ".join(words)


def lines(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Rows as aligned columns: the first one to the left, the others to the right but the last."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:-1], widths[1:-1], strict=True)]
        yield "  ".join([*cells, row[-1]]).rstrip()


def duration(seconds: float, of: float) -> str:
    """In s, ms or us, as suits the time `of` that it is a part of."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if of >= scale:
            return f"{seconds / scale:.3f} {unit}"
    return f"{seconds / 1e-6:.3f} us"


def tflops(number: float) -> str:
    """To a tenth, or to two digits where that would be 0."""
    return f"{number:.1f}" if number >= 1 else f"{number:.2g}"


def overview(entries: Sequence[dict[str, Any]]) -> Iterator[str]:
    rows = [["layout", "step", "TFLOP/s", "MFU", "bubble", "comm", "memory", ""]]
    for entry in entries:
        rows.append(
            [
                entry["layout"],
                duration(entry["step_time_s"], entries[0]["step_time_s"]),
                tflops(entry["model_tflops_per_rank"]),
                f"{entry['mfu']:.1%}",
                f"{entry['bubble_fraction']:.1%}",
                f"{entry['communication_fraction']:.1%}",
                size(entry["peak_memory_bytes"]),
                settings(entry) + ("" if entry["fits"] else "  DOES NOT FIT"),
            ]
        )
    yield from lines(rows)


def _details(entry: dict[str, Any]) -> Iterator[str]:
    """What step and memory of one layout are made of."""
    step_s, total = entry["step_time_s"], entry["peak_memory_bytes"]
    yield f"{entry['layout']}, {settings(entry)}"
    yield f"  a step of {duration(step_s, step_s)}, on the busiest rank"
    for key, word in PARTS.items():
        seconds = entry["step_parts_s"][key]
        yield f"  {word:<16}{duration(seconds, step_s):>12}  {seconds / step_s:>6.1%}"
    yield f"  memory {size(total)} of {size(entry['capacity_bytes'])} per rank"
    for key in MEMORY:
        yield f"  {key:<16}{size(entry['memory_bytes'][key]):>14}"
    if entry["host_memory_bytes"]:
        yield f"  {'on the host':<16}{size(entry['host_memory_bytes']):>14}"
    hardware = entry["hardware_tflops_per_rank"]
    yield f"  with recomputation counted {tflops(hardware)} TFLOP/s per rank"
    if "days" in entry:
        yield f"  training takes {entry['days']:.1f} days, {entry['rank_hours']:,.0f} rank-hours"


def _why(why: dict[str, Any]) -> Iterator[str]:
    entry, changes = why["layout"], why["changes"]
    yield ""
    yield from _details(entry)
    if not entry["fits"]:
        over = entry["peak_memory_bytes"] - entry["capacity_bytes"]
        yield f"  does not fit: {size(over)} too much per rank"
    most = why["largest_difference"]
    seconds = duration(abs(most["seconds"]), entry["step_time_s"])
    yield (
        f"  {why['slower_than_best']:+.1%} step time against the best layout; the largest "
        f"difference: {PARTS[most['part']]}, {seconds} {'more' if most['seconds'] > 0 else 'less'}"
    )
    yield ""
    if not changes:
        yield "no single change makes it faster"
        return
    if why["changes_at_once"] > 1:
        yield "what makes it fit at the least cost of time, one or two changes at once"
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
    """What the paper's rules say."""
    model, ruled = result["microbatch_model"], result["heuristic"]
    yield "beside it, by Narayanan et al. 2021"
    if ruled is None:
        yield "  takeaways 1 to 3   no layout that follows them is legal and fits"
    else:
        step_s = result["layouts"][0]["step_time_s"]
        yield (
            f"  takeaways 1 to 3   {ruled['layout']}, {settings(ruled)}: "
            f"{duration(ruled['step_time_s'], step_s)} ({ruled['step_time_s'] / step_s - 1:+.1%})"
        )
    yield f"  equation 1         b={model['b']} (simulated: b={model['simulated_b']})"


def _train(result: dict[str, Any]) -> Iterator[str]:
    """The first layout as lines of a configuration."""
    if not result["layouts"][0]["fits"]:
        return
    yield ""
    if result["train"] is None:
        yield "ptdmpi train hides no messages over the data axis: a forecast only"
        return
    ranks = result["ranks"]
    yield f"to train so: mpirun -n {ranks} ptdmpi train CONFIG, and in the configuration"
    for section, keys in result["train"].items():
        values = ", ".join(f"{key} = {json.dumps(value)}" for key, value in keys.items())
        yield f"  {section} = {{ {values} }}"


def report(result: dict[str, Any]) -> str:
    """What `ptdmpi plan` prints."""
    ranks = counted(result["ranks"], "rank")
    text = [
        f"{result['model']}: {short(result['parameters'])} parameters, {ranks} of "
        f"{result['cluster']}, {result['precision']}, "
        f"batch {result['batch']} of {result['seq_length']} tokens each",
        "",
        *overview(result["layouts"]),
        *LEGEND,
        "",
        *_details(result["layouts"][0]),
    ]
    if "why" in result:
        text += _why(result["why"])
    if "microbatch_model" in result:
        text += ["", *_beside(result)]
    return "\n".join([*text, *_train(result)])
