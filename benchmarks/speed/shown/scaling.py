"""From one rank to two, as shares of ideal: what `bench` has measured of this project alone."""

from collections.abc import Iterator, Sequence

from benchmarks.speed.case import ALONE, WEAK, GptSizes, Row, grown
from benchmarks.speed.rounds import Result
from ptdmpi.plan.shape.flops import model_flops


def share(result: Result) -> float:
    """FLOP/s of each of the ranks over those of one rank alone: 1 is ideal."""
    row = Row(result.layout, result.precision, grown(result.layout, GptSizes()))
    return result.ratio_median * _per_token(row) / _per_token(row.alone) / row.sizes.ranks


def _per_token(row: Row) -> float:
    return model_flops(row.config.model, row.case.vocab_size, 1)


def lines(results: Sequence[Result]) -> Iterator[str]:
    """A table of strong scaling (the same work) and weak (twice the work) on each axis; nothing
    where none of it was measured."""
    found = {(r.layout, r.precision): share(r) for r in results if r.peer == f"ptdmpi {ALONE}"}
    if not found:
        return
    yield ""
    yield "from one rank to two, share of ideal: the same work; twice the work (batch, or layers)"
    for layout in ("d=2", "t=2", "p=2", "p=2,v=2"):
        for precision in ("fp32", "bf16"):
            keys = [(layout, precision)]
            if f"{layout},weak" in WEAK:
                keys.append((f"{layout},weak", precision))
            cells = [f"{found[key]:6.0%}" if key in found else f"{'-':>6}" for key in keys]
            if any(key in found for key in keys):
                yield f"{layout:12} {precision:5} {' '.join(cells)}"
