"""`make validate-plan`: compare predictions with all published runs, by data set.

The error of a run is its predicted step time divided by its published step time, minus one. An
error below 0 means that the prediction is too optimistic. The table also lists the mean error of
the predicted throughput, in which too optimistic predictions count more. For a prediction of half
the published step time, the error of the step time is 50 %, but the error of the throughput is 100
%. Runs that were used for calibration are listed without an error. A run that is in two figures is
counted once in the total of the figures.
"""

import statistics
from collections import defaultdict

from benchmarks.planning.elsewhere import by_size_table, context_table, source_table
from benchmarks.planning.outside import outside_table
from benchmarks.planning.rows import PublishedRun, published
from ptdmpi.config.layout import Layout
from ptdmpi.plan.cost.price import Price, Pricer
from ptdmpi.plan.machine.cluster import load_cluster
from ptdmpi.plan.show.table import lines

CLUSTER = "selene"
PRECISION = "fp16"
GOALS = {"Table 1": 5, "Table 2, PTD-P": 5, "Table 2, ZeRO-3": 10, "Figures 11 to 18": 8}
# figure -> the sizes of the layout that the figure varies at each batch size
BEST_OF = {"Figure 13": "t, p", "Figure 14": "p, d", "Figure 15": "t, d", "Figure 16": "b"}


def predicted(row: PublishedRun) -> Price:
    """Return the predicted step time and memory of a published run."""
    return Pricer.of(load_cluster(CLUSTER), row.model, row.batch, PRECISION).price(row.layout)


def errors() -> dict[str, list[tuple[float, PublishedRun]]]:
    """Return, for each data set, a list of (relative error of the step time, run) with all
    published runs."""
    by_dataset: dict[str, list[tuple[float, PublishedRun]]] = defaultdict(list)
    figures: dict[str, tuple[float, PublishedRun]] = {}
    for row in published():
        entry = (predicted(row).step_time_s / row.step_time_s - 1, row)
        by_dataset[row.dataset].append(entry)
        if row.dataset.startswith("Figure") and not row.calibrates:
            figures[f"{row.name} {row.layout.recompute} {row.layout.scatter_gather}"] = entry
    by_dataset["Figures 11 to 18"] = list(figures.values())
    return by_dataset


def error_table() -> list[list[str]]:
    """Return a table of the errors of the predicted step times, with a row for each data set."""
    rows = [["data set", "runs", "MAPE", "bias", "of throughput", "goal", "worst run"]]
    for dataset, entries in errors().items():
        if entries[0][1].calibrates:
            rows.append([dataset, str(len(entries)), "", "", "", "", "calibrated the model"])
            continue
        values = [error for error, _ in entries]
        worst, row = max(entries, key=lambda entry: abs(entry[0]))
        rows.append(
            [
                dataset,
                str(len(entries)),
                f"{statistics.fmean(map(abs, values)):.1%}",
                f"{statistics.fmean(values):+.1%}",
                f"{statistics.fmean(abs(1 / (1 + value) - 1) for value in values):.1%}",
                f"{GOALS[dataset]} %" if dataset in GOALS else "",
                f"{worst:+.1%}  {row.name}",
            ]
        )
    return rows


def best_table() -> list[list[str]]:
    """Return a table with the fastest published layout and the layout that is predicted to be
    fastest, for each figure and batch size."""
    rows = [["figure", "batch", "varied", "published best", "predicted best", ""]]
    for figure, varied in BEST_OF.items():
        runs = [row for row in published() if row.dataset == figure]
        for batch in sorted({row.batch for row in runs}):
            same = [row for row in runs if row.batch == batch]
            best = max(same, key=lambda row: row.value)
            guess = min(same, key=lambda row: predicted(row).step_time_s)
            verdict = "right" if guess == best else "WRONG"
            rows.append([figure, str(batch), varied, str(best.layout), str(guess.layout), verdict])
    return rows


def memory_table() -> list[list[str]]:
    """Return a table that checks the predicted memory. All published runs should fit, and the
    predictions should agree with two memory limits that Narayanan et al. 2021 state."""
    runs = [row for row in published() if not row.calibrates]
    prices = [(row, predicted(row)) for row in runs]
    fitting = sum(price.fits for _, price in prices)
    rows = [["runs that were run and are predicted to fit", f"{fitting} of {len(runs)}"]]
    series = [row for row in runs if row.dataset == "Figure 17" and row.layout.recompute == "none"]
    last = max(series, key=lambda row: row.batch)
    cluster = load_cluster(CLUSTER)
    for batch in (last.batch, 2 * last.batch):
        price = Pricer.of(cluster, last.model, batch, PRECISION).price(last.layout)
        rows.append(
            [
                f"Figure 17 without recomputation, batch {batch}: "
                f"{'ran' if batch == last.batch else 'did not fit'}",
                f"predicted {price.memory.total / 1e9:.1f} of {price.capacity_bytes / 1e9:.0f} GB",
            ]
        )
    # Table 2: a microbatch of 4 sequences did not fit on 560 GPUs, but fit on 640 GPUs
    (zero,) = [r for r in runs if r.layout.shards_weights and r.layout.data == 640]
    for data in (640, 560):
        layout = Layout(
            tensor=1, pipeline=1, data=data, virtual=1, micro_size=4, recompute="full", zero=3
        )
        memory = Pricer.of(cluster, zero.model, 4 * data, PRECISION).footprint(layout)
        rows.append(
            [
                f"Table 2, ZeRO-3, 530B, b=4 on {data} GPUs: "
                f"{'ran' if data == 640 else 'did not fit'}",
                f"predicted {memory.total / 1e9:.1f} GB",
            ]
        )
    return rows


def main() -> None:
    """Print all tables."""
    tables = (error_table, best_table, memory_table, outside_table)
    for table in (*tables, source_table, by_size_table, context_table):
        print("\n".join(lines(table())), end="\n\n")


if __name__ == "__main__":
    main()
