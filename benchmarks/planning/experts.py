"""`python -m benchmarks.planning.experts`: compare predictions with published runs of models with
experts, and write the tables into docs/explanation/planning.md.

The runs are those of Liu et al. 2025 (arXiv 2504.14960) with Megatron-Core on H100 GPUs. The paper
states the model, the layout, the batch and the MFU of a run. The step time in the files is computed
from the MFU, a peak of 989.5 TFLOP/s, and FLOPs that count all attention scores, as Megatron-Core
counts them. No constant of the planner was fitted to these runs.
"""

import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cache

from benchmarks.launch import ROOT
from benchmarks.marks import put, table
from benchmarks.planning.elsewhere import MappedRun, MappedSource, fastest, rank_correlation
from benchmarks.planning.rows import read
from ptdmpi.plan.cost.price import Price, Pricer

PAGE = ROOT / "docs/explanation/planning.md"
CHOSEN = (
    "the b, v and recomputation with the fastest prediction that fits; ZeRO 1 (stated), sequence "
    "parallelism and overlap of all messages; memory for the mean number of tokens, because the "
    "runs drop all tokens above it (capacity factor 1)"
)
# properties of Megatron-Core's software; the planner assumes that all-to-alls do not overlap with
# computation
SOFTWARE = {"overlap_tensor": True, "fullest": 1}
DIVIDED = "experts divided by"
OVERLAPPED = {"sequence_parallel": True, "dp_overlap": True}


def _source(title: str, file: str, chosen: str) -> MappedSource:
    return MappedSource(
        title,
        file,
        "dgx-h100",
        chosen,
        software=SOFTWARE,
        layout=OVERLAPPED,
        model={"kind": "llama"},
        open_sizes=True,
    )


SHORT = _source(
    "Megatron-Core, four models with experts on 64 to 1,024 H100 (Liu et al. 2025, arXiv "
    "2504.14960, Tables 1, 3 and 4)",
    "moe_megatron",
    CHOSEN,
)
LONG = _source(
    "Megatron-Core, Mixtral 8x22B, s = 16,384 to 131,072 on 128 to 1,024 H100 (the same, Table 5)",
    "moe_context",
    f"{CHOSEN}; keys and values are gathered (Megatron-Core sends them in a ring)",
)
SHARDED = _source(
    "Megatron-Core with ZeRO 3 (the same, Tables 1 and 3)", "moe_zero3", "b is not stated"
)
SOURCES = (SHORT, LONG, SHARDED)


@cache
def price_of(file: str, number: int) -> Price:
    """Return the prediction for the run in the row with the index `number` of the published file
    `file`."""
    (source,) = (source for source in SOURCES if source.file == file)
    row = read(file)[number]
    return fastest(_pricer(source, row), source.layout_of(row))


def _pricer(source: MappedSource, row: dict[str, str]) -> Pricer:
    return Pricer.of(source.machine(row), source.model_of(row), int(row["B"]), "bf16")


def run_of(source: MappedSource, number: int) -> MappedRun:
    """Return the run in the row with the index `number`, with its predicted step time."""
    row, price = read(source.file)[number], price_of(source.file, number)
    ranked = (row["group"], row["B"], row["s"], str(price.layout.ranks))
    return MappedRun(price.layout, ranked, float(row["step_time_s"]), price.step_time_s)


def sent_once(source: MappedSource, number: int) -> float:
    """Return the error that the prediction for a run would have if only one of the t tensor ranks
    sent each token to its experts, as in Megatron-Core. The time of the all-to-alls is then 1 / t
    of their time in the prediction. Megatron-Core must also gather tokens over the tensor axis, but
    the time of these gathers is not added."""
    run, price = run_of(source, number), price_of(source.file, number)
    tensor = run.layout.tensor
    return (run.predicted_s - price.parts.expert * (tensor - 1) / tensor) / run.measured_s - 1


def kind_of(source: MappedSource, row: dict[str, str]) -> str:
    """Return how the run in a row distributes experts and positions, for the summary."""
    if source is LONG:
        return "whole experts, c = 4 and 8"
    if row["et"] == "1":
        return "whole experts"
    return f"{DIVIDED} t = 2" if row["t"] == "2" else f"{DIVIDED} t = 4 and 8"


def line_of(source: MappedSource, number: int) -> list[str]:
    """Return the entries of the table's line for the run with the index `number`."""
    row, run = read(source.file)[number], run_of(source, number)
    return [
        row["table"],
        row["group"],
        row["B"],
        f"`{run.layout}`",
        f"{run.measured_s:.2f} s",
        f"{run.predicted_s:.2f} s",
        f"{run.error:+.0%}",
    ]


def judged() -> Iterator[tuple[MappedSource, int]]:
    """Yield the source and the index of each run that counts in the table of errors."""
    for source in (SHORT, LONG):
        yield from ((source, number) for number in range(len(read(source.file))))


def run_table() -> list[list[str]]:
    """Return a table with a line for each run of `judged`."""
    head = ["table", "model", "batch", "layout", "published", "predicted", "error"]
    return [head, *(line_of(source, number) for source, number in judged())]


def summary_table() -> list[list[str]]:
    """Return a table of the errors, by the way in which experts are distributed."""
    errors = defaultdict[str, list[float]](list)
    for source, number in judged():
        kind = kind_of(source, read(source.file)[number])
        errors[kind].append(run_of(source, number).error)
        errors["all"].append(run_of(source, number).error)
        if kind.startswith(DIVIDED):
            errors[f"{kind}, 1/t of the all-to-alls"].append(sent_once(source, number))
    head = ["runs", "number", "mean error", "median error", "bias", "smallest, largest"]
    return [head, *(_summary(kind, errors[kind]) for kind in sorted(errors, reverse=True))]


def _summary(kind: str, errors: Iterable[float]) -> list[str]:
    signed = sorted(errors)
    return [
        kind,
        str(len(signed)),
        f"{statistics.fmean(map(abs, signed)):.1%}",
        f"{statistics.median(map(abs, signed)):.1%}",
        f"{statistics.fmean(signed):+.1%}",
        f"{signed[0]:+.0%}, {signed[-1]:+.0%}",
    ]


def sharded_table() -> list[list[str]]:
    """Return a table of the runs with ZeRO 3, which do not count in the table of errors. With ZeRO
    3, weights are gathered for each microbatch, so the time depends on the microbatch size b, which
    the paper does not state. Therefore the table has the predictions for b = 1 and for the fastest
    b that fits."""
    lines = [["model", "layout", "published", "b = 1", "the fastest b"]]
    for number, row in enumerate(read(SHARDED.file)):
        stated, run = SHARDED.layout_of(row), run_of(SHARDED, number)
        least = _pricer(SHARDED, row).price(stated)
        lines.append(
            [
                row["group"],
                f"`{str(stated).removesuffix(',v=1,b=1')}`",
                f"{run.measured_s:.2f} s",
                f"{least.step_time_s:.2f} s",
                f"{run.predicted_s:.2f} s (b = {run.layout.micro_size})",
            ]
        )
    return lines


def main() -> None:
    """Write all tables into the page, and print them."""
    ranking = rank_correlation([run_of(SHORT, n) for n in range(len(read(SHORT.file)))])
    print(f"tau {ranking.tau:.2f} over {ranking.pairs} pairs, regret {ranking.regret:.1%}")
    for name, make in TABLES.items():
        head, *rows = make()
        put(PAGE, name, list(table(head, rows)))


# mark in the page -> function that returns the table
TABLES = {
    "experts": summary_table,
    "runs with experts": run_table,
    "experts with ZeRO 3": sharded_table,
}

if __name__ == "__main__":
    main()
