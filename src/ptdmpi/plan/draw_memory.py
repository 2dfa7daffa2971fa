"""Memory over the time of a step, one line per pipeline rank, beside what a rank has."""

from pathlib import Path

from ptdmpi.config import InputError
from ptdmpi.plan import pipeline
from ptdmpi.plan.layout import Layout
from ptdmpi.plan.price import Pricer
from ptdmpi.plan.schedule import FORWARD, Op
from ptdmpi.plan.simulate import COMPUTE_KINDS

LABELLED_RANKS = 8  # more lines than this are told apart by their shade alone


def over_time(pricer: Pricer, layout: Layout) -> list[tuple[list[float], list[float]]]:
    """Of each pipeline rank: (moments in s, bytes from each of them on).

    Weights, gradients and optimizer state stand all the time. A forward leaves its activations, its
    backward needs some beside and frees them.
    """
    layers, microbatches = pricer.split(layout), layout.microbatches(pricer.batch)
    timeline = pipeline.timeline(
        layout.schedule,
        layout.pipeline,
        layout.virtual,
        microbatches,
        pricer.stage_times(layout),
        str(layout),
    )
    kept = pricer.footprints.kept_by_stage(layout, layers)
    curves = []
    for rank in range(layout.pipeline):
        peak = pricer.footprints.peak(layout, layers, rank, microbatches)
        now = peak.standing
        moments, amounts = [0.0], [now]
        spans = [s for s in timeline.spans if s.rank == rank and s.kind in COMPUTE_KINDS]
        for span in sorted(spans, key=lambda s: s.start_s):
            op = Op.parse(span.op)
            moments += [span.start_s, span.end_s]
            if op.kind == FORWARD:
                now += kept[op.stage]
                amounts += [now, now]
            else:
                amounts.append(now + peak.working)
                now -= kept[op.stage]
                amounts.append(now)
        curves.append((moments, amounts))
    return curves


def draw(pricer: Pricer, layout: Layout, path: str | Path) -> None:
    """Writes the picture (.png or .svg). Raises InputError if it cannot be written."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), dpi=150, layout="constrained")
    axes = figure.subplots()
    curves = over_time(pricer, layout)
    for rank, (moments, amounts) in enumerate(curves):
        shade = colormaps["viridis"](0.9 * rank / max(1, len(curves) - 1))
        label = f"rank {rank}" if _labelled(rank, len(curves)) else None
        gibibytes = [amount / 2**30 for amount in amounts]
        axes.step(moments, gibibytes, where="post", color=shade, linewidth=1.1, label=label)
    capacity = pricer.capacity_bytes / 2**30
    axes.axhline(capacity, color="#c8511b", linestyle="--", linewidth=1)
    axes.annotate(
        f"a rank has {capacity:,.1f} GiB",
        (0, capacity),
        xytext=(4, 4),
        textcoords="offset points",
        color="#c8511b",
    )
    axes.set_ylim(0, 1.15 * max(capacity, *(max(amounts) / 2**30 for _, amounts in curves)))
    axes.set_xlim(left=0)
    axes.set_xlabel("time (s)")
    axes.set_ylabel("GiB per rank")
    axes.set_title(f"memory of {layout}, {layout.schedule}", loc="left", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8, ncols=2, title="pipeline")
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be written: {error}") from None


def _labelled(rank: int, ranks: int) -> bool:
    return ranks <= LABELLED_RANKS or rank in (0, ranks // 2, ranks - 1)
