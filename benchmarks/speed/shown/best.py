"""A line for each row: the ratio to the fastest other trainer, the time of matrix products and
attention as a fraction of the step time, and the number of undisturbed rounds."""

from collections.abc import Iterator, Sequence

from benchmarks.speed.rounds import Result, percent


def lines(results: Sequence[Result]) -> Iterator[str]:
    """Yield a heading, and a line for each row with other trainers. A line has the ratio of
    ptdmpi's rate to the rate of the fastest other trainer, the fraction of ptdmpi's step that its
    matrix products and attention alone would take, and the number of undisturbed rounds. Yield
    nothing if there is no such row. Trainers whose products run in scalar code are left out."""
    rows: dict[tuple[str, str], list[Result]] = {}
    for result in results:
        if result.tool != "ptdmpi" and not result.scalar:
            rows.setdefault((result.layout, result.precision), []).append(result)
    if rows:
        yield ""
        yield "ratio to the fastest other trainer, share of the limit, undisturbed rounds"
    for (layout, precision), others in rows.items():
        best = min(others, key=lambda result: result.ratio_median)
        yield (
            f"{layout:12} {precision:5} {best.ratio_median:6.3f} {percent(best.limit_share)} "
            f"{len(best.rounds) - best.disturbed:5d}  {best.tool}"
        )
