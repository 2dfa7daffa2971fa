"""A picture of the memory during a step: a curve for each pipeline rank, and a line for the memory
that is available to a rank."""

from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

from ptdmpi.config.layout import Layout
from ptdmpi.plan.cost import pipeline
from ptdmpi.plan.cost.memory import MemoryModel
from ptdmpi.plan.cost.price import Pricer
from ptdmpi.plan.schedule.held import Held, held
from ptdmpi.plan.schedule.ops import Op
from ptdmpi.plan.schedule.simulate import Span
from ptdmpi.plan.show.draw import check_picture, save

MOST_DRAWN = 8  # if there are at most this many ranks, all ranks are drawn
SOME_DRAWN = 5  # number of evenly spaced ranks that are drawn if there are more ranks
COLUMNS = 400  # approximate number of points in a drawn curve


def over_time(pricer: Pricer, layout: Layout) -> list[tuple[list[float], list[float]]]:
    """Return, for each pipeline rank, its memory during a step as (moments in seconds, bytes in use
    from each moment on).

    Weights, gradients and optimizer state are in memory during the whole step. Each op (forward or
    backward) uses its working memory while it runs, adds the tensors that it keeps for later ops,
    and frees tensors that earlier ops kept.
    """
    memory, microbatches = pricer.memory, layout.microbatches(pricer.batch)
    times = pricer.times.stage_times(layout, microbatches)
    timeline = pipeline.timeline(layout.schedule, microbatches, times, str(layout))
    curves = []
    for rank in range(layout.pipeline):
        standing = memory.peak(layout, rank, microbatches).standing
        spans = [s for s in timeline.spans if s.rank == rank and s.computes]
        spans.sort(key=lambda span: span.start_s)
        # two moments per op: the peak while it runs, and the memory that remains after it
        moments, amounts = [0.0], [standing]
        for span, moment in zip(spans, _walk(memory, layout, rank, spans), strict=True):
            moments += [span.start_s, span.end_s]
            amounts += [standing + moment.during, standing + moment.after]
        curves.append((moments, amounts))
    return curves


def _walk(memory: MemoryModel, layout: Layout, rank: int, spans: Sequence[Span]) -> Iterator[Held]:
    """Yield, for each of a rank's ops in `spans`, the bytes of memory that the rank uses during and
    after the op. Bytes that are in use during the whole step are not included."""
    beside = memory.beside_bytes(layout, rank)
    ops = [Op.parse(span.op) for span in spans]
    return held(
        ops,
        cache(lambda name, stage: memory.stages.stored_bytes[name](layout, stage)),
        cache(lambda name, stage: memory.stages.needed_bytes[name](layout, stage) + beside),
    )


def draw(pricer: Pricer, layout: Layout, path: str | Path) -> None:
    """Write the picture of a layout's memory to `path` (.png or .svg). Raises InputError if the
    picture cannot be written."""
    check_picture(path)
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), dpi=150, layout="constrained")
    axes = figure.subplots()
    curves = over_time(pricer, layout)
    shown = drawn_ranks([max(amounts) for _, amounts in curves])
    for rank in shown:
        shade = colormaps["viridis"](0.9 * rank / max(1, len(curves) - 1))
        moments, low, high = envelope(*curves[rank])
        lows, highs = ([amount / 2**30 for amount in amounts] for amounts in (low, high))
        axes.fill_between(moments, lows, highs, step="post", color=shade, alpha=0.25, linewidth=0)
        axes.step(moments, highs, where="post", color=shade, linewidth=1.1, label=f"rank {rank}")
    capacity = pricer.capacity_bytes / 2**30
    has = f"a rank has {capacity:,.1f} GiB"
    axes.axhline(capacity, color="#c8511b", linestyle="--", linewidth=1, label=has)
    axes.set_ylim(0, 1.1 * max(capacity, *(max(amounts) / 2**30 for _, amounts in curves)))
    axes.set_xlim(left=0)
    axes.set_xlabel("time (s)")
    axes.set_ylabel("GiB per rank")
    title = f"memory of {pricer.model.name} on {pricer.cluster.name}: {layout}, {layout.schedule}"
    axes.set_title(title, loc="left", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    which = "pipeline ranks"
    if len(shown) < len(curves):
        which = f"{len(shown)} of {len(curves)} {which}"
    figure.legend(
        frameon=False, fontsize=8, title_fontsize=9, loc="outside right upper", title=which
    )
    save(figure, path)


def drawn_ranks(peaks: list[float]) -> list[int]:
    """Return the pipeline ranks whose memory is drawn. All ranks are drawn if there are at most
    MOST_DRAWN. If there are more, SOME_DRAWN evenly spaced ranks and the rank with the highest peak
    are drawn."""
    last = len(peaks) - 1
    if last < MOST_DRAWN:
        return list(range(last + 1))
    some = {round(last * part / (SOME_DRAWN - 1)) for part in range(SOME_DRAWN)}
    return sorted(some | {max(range(last + 1), key=lambda rank: peaks[rank])})


def envelope(
    moments: list[float], amounts: list[float]
) -> tuple[list[float], list[float], list[float]]:
    """Return (moments, smallest memory, largest memory), three lists of at most about `COLUMNS`
    numbers each. `amounts` has the memory in use from each of the `moments` on. The second and the
    third list have the smallest and the largest memory between each returned moment and the next,
    so that short peaks stay visible in a picture."""
    if len(moments) <= COLUMNS:
        return moments, amounts, amounts
    width = moments[-1] / COLUMNS
    starts, low, high, now = [moments[0]], [amounts[0]], [amounts[0]], amounts[0]
    for moment, amount in zip(moments, amounts, strict=True):
        if moment >= starts[-1] + 2 * width:  # memory did not change for at least one column
            starts.append(starts[-1] + width)
            low.append(now)
            high.append(now)
        if moment >= starts[-1] + width:
            starts.append(moment)
            low.append(amount)
            high.append(amount)
        low[-1], high[-1], now = min(low[-1], amount), max(high[-1], amount), amount
    return starts, low, high
