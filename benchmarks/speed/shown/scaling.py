"""Scaling efficiency of two ranks, computed from the rows that compare ptdmpi with itself."""

from collections.abc import Iterator, Sequence

from benchmarks.speed.case import ALONE, WEAK, GptSizes, Row, grown
from benchmarks.speed.rounds import Result
from ptdmpi.plan.shape.flops import model_flops


def share(result: Result) -> float:
    """Return the scaling efficiency of a row: the FLOP/s per rank divided by the FLOP/s of a single
    rank. 1 is ideal."""
    row = Row(result.layout, result.precision, grown(result.layout, GptSizes()))
    return result.ratio_median * _per_token(row) / _per_token(row.alone) / row.sizes.ranks


def _per_token(row: Row) -> float:
    return model_flops(row.config.model, row.case.vocab_size, 1)


def lines(results: Sequence[Result]) -> Iterator[str]:
    """Yield the lines of a table of strong scaling (the same work) and weak scaling (twice the
    work) on each axis. Yield nothing if no scaling was measured."""
    alone = [result for result in results if result.peer == f"ptdmpi {ALONE}"]
    shares = {(result.layout, result.precision): share(result) for result in alone}
    if not shares:
        return
    yield ""
    yield "scaling efficiency of two ranks: the same work; twice the work (batch, or layers)"
    for layout in ("d=2", "t=2", "p=2", "p=2,v=2"):
        for precision in ("fp32", "bf16"):
            keys = [(layout, precision)]
            if f"{layout},weak" in WEAK:
                keys.append((f"{layout},weak", precision))
            cells = [f"{shares[key]:6.0%}" if key in shares else f"{'-':>6}" for key in keys]
            if any(key in shares for key in keys):
                yield f"{layout:12} {precision:5} {' '.join(cells)}"
