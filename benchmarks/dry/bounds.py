"""A check of the counts in docs/reference/gpu-dry.md against bounds. Three counts of one layer of
ptdmpi are compared with the smallest count of the other trainers: the launches, the bytes that are
moved outside of matrix products, and the bytes of activations. A further check is that cuDNN
computes ptdmpi's attention. The counted peak of memory, and the bytes that NCCL sends, are compared
with the planner's predictions."""

from collections.abc import Iterator, Mapping
from typing import Any

OURS = "ptdmpi"
# column -> the greatest allowed ratio of ptdmpi's count to the smallest count of another trainer
OF_BEST = {"launches": 0.8, "GB outside of products": 0.8, "activations, GB": 1.0}
PLANNED = 0.05  # greatest allowed relative difference of a counted peak from the planned peak
# The number of launches by cuDNN in the forward and backward of one layer of ptdmpi. These launches
# compute attention.
CUDNN, OF_CUDNN = "by cuDNN", 2
# The relative difference of the bytes that NCCL sends from the planned bytes. It must be 0.
OFF_PLAN = "difference, %"
PEAK, PLANNED_PEAK = "peak, GB", "planned peak, GB"

Rows = Mapping[str, Any]


def missed(rows: Rows) -> dict[str, str]:
    """Return a text for each row whose counts violate a bound: the counted value and the bound.
    `rows` are the rows of one table, by name. A row for one layer has the name "MODEL: TRAINER".
    Rows without counts are skipped, because `benchmarks.dry.run` reports the reasons why they have
    none.
    """
    of_row: dict[str, list[str]] = {}
    for name, why in [*_beside_others(rows), *_beside_planner(rows)]:
        of_row.setdefault(name, []).append(why)
    return {name: "; ".join(whys) for name, whys in of_row.items()}


def _beside_others(rows: Rows) -> Iterator[tuple[str, str]]:
    for name, row in rows.items():
        model, _, trainer = name.partition(": ")
        if trainer != OURS:
            continue
        if row.get(CUDNN, OF_CUDNN) != OF_CUDNN:
            yield name, f"{CUDNN} = {row[CUDNN]}, not {OF_CUDNN}"
        others = [rows[other] for other in rows if other.startswith(f"{model}: ") and other != name]
        for column, ratio in OF_BEST.items():
            best = min((other[column] for other in others if column in other), default=None)
            if best is not None and row.get(column, 0.0) > ratio * best:
                yield name, f"{column} = {row[column]:.3g}, above {ratio:g} of {best:.3g}"


def _beside_planner(rows: Rows) -> Iterator[tuple[str, str]]:
    for name, row in rows.items():
        if not isinstance(row, dict):
            continue
        if row.get(OFF_PLAN):
            yield name, f"the bytes that NCCL sends differ by {row[OFF_PLAN]:+.3g} % from the plan"
        ratio = row[PEAK] / row[PLANNED_PEAK] if PLANNED_PEAK in row else 1.0
        if abs(ratio - 1.0) > PLANNED:
            yield name, f"its peak is {ratio:.3f} of the planned peak"
