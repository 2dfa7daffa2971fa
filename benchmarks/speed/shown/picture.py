"""A picture of results/latest.json: for each row, ptdmpi's tokens per second divided by the tokens
per second of each other trainer."""

import json
from pathlib import Path
from typing import Any

from benchmarks.launch import ROOT
from benchmarks.speed.case import PRECISIONS, WEAK

PICTURE = ROOT / "docs/pictures/bench.png"
COLORS = {
    "torch": "#d1495b",
    "megatron": "#00798c",
    "deepspeed": "#edae49",
    "torchtitan": "#66a182",
    "transformers": "#8d6a9f",
}


def draw(source: Path, target: Path) -> None:
    """Draw a panel for each data type. The panel shows the median ratio of each trainer, with error
    bars from the smallest to the greatest ratio of a round."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    content = json.loads(source.read_text())
    rows = [row for row in content["rows"] if row["tool"] in COLORS and not row["scalar"]]
    figure, panels = plt.subplots(1, 2, figsize=(11, 4), sharey=True)
    for panel, precision in zip(panels, PRECISIONS, strict=True):
        _panel(panel, [row for row in rows if row["precision"] == precision])
        panel.set_title(precision)
    panels[0].set_ylabel("tokens/s, this project over the other")
    machine = content["machine"]
    figure.suptitle(
        f"{machine['cpu']}, {machine['cores']} cores, bf16 instructions: {machine['bf16']}; "
        f"one thread a rank",
        fontsize=10,
    )
    known = dict.fromkeys(row["tool"] for row in rows)
    handles = [plt.Line2D([], [], marker="o", ls="", color=COLORS[t], label=t) for t in known]
    if handles:
        figure.legend(handles=handles, loc="lower center", ncols=len(handles), frameon=False)
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, dpi=110)
    plt.close(figure)


def _panel(panel: Any, rows: list[dict[str, Any]]) -> None:
    layouts = [name for name in dict.fromkeys(row["layout"] for row in rows) if name not in WEAK]
    for place, layout in enumerate(layouts):
        beside = [row for row in rows if row["layout"] == layout]
        for number, row in enumerate(beside):
            at = place + 0.16 * (number - (len(beside) - 1) / 2)
            ends = [
                [row["ratio_median"] - row["ratio_min"]],
                [row["ratio_max"] - row["ratio_median"]],
            ]
            panel.errorbar(
                [at],
                [row["ratio_median"]],
                yerr=ends,
                fmt="o",
                capsize=3,
                color=COLORS[row["tool"]],
            )
    panel.axhline(1.0, color="black", lw=0.8)
    panel.set_xticks(range(len(layouts)), layouts, rotation=25, ha="right")
    panel.grid(axis="y", alpha=0.3)
