"""Predictions of the published runs in `outside.csv`.

These runs were not used to calibrate any value of the planner, nor to choose any term of the
planner's model. The runs of 2022 were made with a newer program than the runs of 2021. The newer
program overlaps all-reduces between tensor ranks with the computation of weight gradients.
"""

import csv
from collections.abc import Iterator
from pathlib import Path

from ptdmpi.config.layout import complete, parse
from ptdmpi.plan.cost.price import Price, Pricer
from ptdmpi.plan.machine.cluster import Cluster, load_cluster, load_model

RUNS = Path(__file__).parent / "outside.csv"


def _cluster(name: str, year: str) -> Cluster:
    cluster = load_cluster(name)
    newer = cluster.software.model_copy(update={"overlap_tensor": year >= "2022"})
    return cluster.model_copy(update={"software": newer})


def runs() -> Iterator[tuple[dict[str, str], Price]]:
    """Yield each row of the file with its prediction."""
    with open(RUNS, encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            layout = complete(
                parse(row["layout"]),
                None,
                recompute=row["recompute"],
                sequence_parallel=row["sequence_parallel"] == "yes",
                dp_overlap=row["dp_overlap"] == "yes",
            )
            cluster = _cluster(row["cluster"], row["software"])
            pricer = Pricer.of(cluster, load_model(row["model"]), int(row["batch"]), "fp16")
            yield row, pricer.price(layout)


def outside_table() -> list[list[str]]:
    """Return a table of the runs with their published and predicted step times."""
    rows = [["run", "layout", "batch", "published", "predicted", "error", "source"]]
    for row, price in runs():
        published_s = float(row["step_time_s"])
        size = f"{row['model']} {row['recompute']}"
        if row["sequence_parallel"] == "yes":
            size += ", sequence parallel"
        rows.append(
            [
                size,
                str(price.layout),
                row["batch"],
                f"{published_s:.2f} s",
                f"{price.step_time_s:.2f} s",
                f"{price.step_time_s / published_s - 1:+.1%}",
                row["source"],
            ]
        )
    return rows
