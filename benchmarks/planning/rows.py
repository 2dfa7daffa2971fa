"""The published measurements in `benchmarks/planning/published/`, read as layouts and step times.

Each row of the papers' tables and figures states a model, a layout, a batch size and a time. If a
row does not state other values, this module assumes one virtual stage per rank, no overlap of
communication, and stages of equal size.
"""

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ptdmpi.config.choices import default_schedule
from ptdmpi.config.layout import Layout
from ptdmpi.plan.machine.cluster import Model, model_of

PUBLISHED = Path(__file__).parent / "published"
# the files whose runs are read if no file is named
JUDGED = ("narayanan2021_table1", "narayanan2021_table2", "narayanan2021_figures")


@dataclass(frozen=True)
class PublishedRun:
    """A published run. `dataset` is the table or figure that contains the run, and `value` is the
    published value, such as the value on a figure's vertical axis."""

    dataset: str
    model: Model
    layout: Layout
    batch: int
    step_time_s: float
    value: float
    name: str

    @property
    def calibrates(self) -> bool:
        """Return True if the planner was calibrated on this run."""
        return self.dataset == "Figure 7"


def read(name: str) -> list[dict[str, str]]:
    """Return the rows of the published file `name`, unchanged."""
    with open(PUBLISHED / f"{name}.csv", encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def published(*names: str) -> Iterator[PublishedRun]:
    """Yield the published runs in the files `names` (by default, the files of Narayanan et al.
    2021) that are in a table or figure and whose layout is stated."""
    for name in names or JUDGED:
        for raw in read(name):
            if raw["t"] and raw["table_ref"].startswith(("Table", "Fig")):
                yield _row(raw)


def _row(raw: dict[str, str]) -> PublishedRun:
    dataset = raw["table_ref"].split(" /")[0].replace("Fig ", "Figure ")
    if dataset == "Table 2":
        dataset += ", ZeRO-3" if raw["zero"] == "3" else ", PTD-P"
    sizes = {"layers": int(raw["l"]), "hidden": int(raw["h"]), "heads": int(raw["a"])}
    model = model_of(
        raw["model"], {**sizes, "seq_length": int(raw["s"]), "vocab_size": int(raw["V"])}
    )
    virtual = int(raw["v"] or 1)
    # Figure 7 does not state the mode of recomputation. Full recomputation is assumed, because
    # without it the largest microbatch would need 190 GB.
    full = raw["recompute"].startswith("full") or dataset == "Figure 7"
    layout = Layout(
        tensor=int(raw["t"]),
        pipeline=int(raw["p"]),
        data=int(raw["d"]),
        virtual=virtual,
        micro_size=int(raw["b"]),
        schedule=default_schedule(virtual),
        recompute="full" if full else "none",
        scatter_gather="OFF" not in raw["notes"],
        zero=int(raw["zero"]),
        dp_overlap=raw["dp_overlap"].startswith("yes"),
    )
    batch = int(raw["B"])
    return PublishedRun(
        dataset=dataset,
        model=model,
        layout=layout,
        batch=batch,
        step_time_s=float(raw["iter_time_s"]),
        value=float(raw["value"]),
        name=f"{raw['model']} {layout} B={batch}",
    )
