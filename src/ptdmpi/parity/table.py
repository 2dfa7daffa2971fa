"""The table as Markdown that is readable as it stands, at most 120 columns, and as JSON."""

import itertools
import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from ptdmpi.config import Layout
from ptdmpi.parity.compare import BARS, MUON_BARS, Greatest, bars_of, left_out
from ptdmpi.parity.layouts import (
    LAYOUT_FACTORS,
    MODEL_FACTORS,
    AdaptedModel,
    ComparedModel,
    MuonModel,
    Pair,
    missing_pairs,
)
from ptdmpi.parity.suite import COVERING, Comparison, Verdict

WIDTH = 120
HEADINGS = (
    "t p v d b z",
    "schedule",
    "options",
    "M",
    *(f"{compute} loss norm grads params" for compute in BARS),
    "bits",
)


def text(rows: Sequence[Verdict], ranks: int, steps: int) -> str:
    """All rows, what stands behind their short words, and the verdict as the last line."""
    models = list(dict.fromkeys(row.comparison.case.model for row in rows))
    lines: list[str] = []
    for section, of_section in itertools.groupby(rows, lambda row: row.comparison.section):
        cells = [_cells(row, models) for row in of_section]
        widths = [max(map(len, column)) for column in zip(HEADINGS, *cells, strict=True)]
        lines += [f"{section}:", ""]
        lines += [_line(HEADINGS, widths), _line(["-" * width for width in widths], widths)]
        lines += [*(_line(row, widths) for row in cells), ""]
    lines += [*_legend(models, steps), ""]
    lines += [*_missing(rows, ranks), ""]
    broken = [(row, what) for row in rows for what in row.red()]
    lines += [f"RED: {_describe(row)}: {what}" for row, what in broken]
    count = sum(bool(row.red()) for row in rows)
    lines.append(f"{len(rows)} rows, {count} red" if count else f"{len(rows)} rows, all ok")
    return "\n".join(lines)


def named(comparison: Comparison) -> str:
    """What its row is called where rows are asked for: section, sizes, schedule, options, model."""
    layout, model = comparison.case.layout, comparison.case.model
    words = [comparison.section, _sizes(layout), layout.schedule, _options(layout), model.kind]
    return ", ".join(words)


def _describe(row: Verdict) -> str:
    layout = row.comparison.case.layout
    return f"t p v d b z = {_sizes(layout)} {layout.schedule} {_options(layout)}".rstrip(" -")


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    padded = (cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
    return f"| {' | '.join(padded)} |"


def _cells(row: Verdict, models: Sequence[ComparedModel]) -> list[str]:
    case = row.comparison.case
    return [
        _sizes(case.layout),
        case.layout.schedule,
        _options(case.layout),
        chr(ord("A") + models.index(case.model)),
        *(_measured(row, compute) for compute in BARS),
        " ".join("RED" if where else "ok" for where in row.bits.values()) or "-",
    ]


def _measured(row: Verdict, compute: str) -> str:
    of_type, bars = row.differences[compute], bars_of(row.comparison.case.model)
    fine = all(one.within(bars[compute][name]) for name, one in of_type.items())
    fine = fine and not row.torn[compute]
    return " ".join([*(_short(one.value) for one in of_type.values()), "ok" if fine else "RED"])


def _short(value: float) -> str:
    return f"{value:5.0e}" if value and math.isfinite(value) else f"{value:<5.0f}"


def _sizes(layout: Layout) -> str:
    axes = (layout.tensor, layout.pipeline, layout.virtual, layout.data)
    return " ".join(map(str, (*axes, layout.micro_size, layout.zero)))


def _options(layout: Layout) -> str:
    words = {
        "sp": layout.sequence_parallel,
        "sg": layout.scatter_gather,
        {"selective": "sel"}.get(layout.recompute, layout.recompute): layout.recompute != "none",
        "pa": layout.partition_activations,
        f"g{layout.shard_group}": layout.shard_group is not None,
        "of": layout.offload != "none",
    }
    return " ".join(word for word, on in words.items() if on) or "-"


def _legend(models: Sequence[ComparedModel], steps: int) -> list[str]:
    lines = [
        f"{steps} steps; greatest relative difference from one rank that takes the global batch "
        "as one microbatch.",
        "loss, norm: of every step; grads: of the first step; params: after the last step; of a "
        "tensor, greatest",
        "difference over greatest magnitude. bits: float32 and bfloat16, loss, norm, gradients and "
        "parameters.",
        f"Bars: {'; '.join(f'{compute} {_bars(BARS[compute])}' for compute in BARS)}; bits: equal "
        "(-: this wire promises none).",
        *(
            [f"Of Muon, whose iteration is in bfloat16: fp32 {_bars(MUON_BARS['fp32'])}."]
            if any(isinstance(model, MuonModel) for model in models)
            else []
        ),
        "sp sequence parallel, sg scatter/gather, sel and full recomputation, pa partitioned;",
        "z: what zero shards, g2: in groups of 2, of: the optimizer's state in a file.",
    ]
    for letter, model in enumerate(models, ord("A")):
        words = [
            f"{model.layers} layers",
            f"vocabulary {model.vocab_size}",
            "tied" if model.tied else "untied",
            "dropout" if model.dropout else "no dropout",
            "masked tokens" if model.masked else "no masks",
            "documents" if model.documents else "no documents",
            *([f"frozen, with {model.method}"] if isinstance(model, AdaptedModel) else ()),
            *(["Muon"] if isinstance(model, MuonModel) else ()),
        ]
        lines.append(f"Model {chr(letter)}: {model.kind}, {', '.join(words)}.")
    if names := left_out(models):
        lines.append(f"Left out, for the true gradient is zero: the keys' part of {names[0]}")
        lines.append(f"to {names[-1]} (their bits are compared).")
    return lines


def _bars(bars: Mapping[str, float]) -> str:
    return f"{bars['loss']:.0e} (params {bars['parameters']:.0e})"


def _missing(rows: Sequence[Verdict], ranks: int) -> list[str]:
    """Pairs of settings in no row of the covering set, by reason."""
    lines: list[str] = []
    missing = _missing_pairs(rows, ranks)
    if legal := missing.pop("", []):
        lines.append(f"A short set: {len(legal)} legal pairs of settings stand in no row.")
    else:
        lines.append("Every legal pair of settings stands in a row of the first table.")
    for reason, found in missing.items():
        words = [" ".join(f"{name}={value}" for name, value in pair) for pair in found]
        lines += textwrap.wrap(f"Not legal ({reason}): {', '.join(words)}.", WIDTH)
    return lines


def _missing_pairs(rows: Sequence[Verdict], ranks: int) -> dict[str, list[Pair]]:
    covering = [row.comparison.case for row in rows if row.comparison.section == COVERING]
    return missing_pairs(covering, ranks)


def as_json(rows: Sequence[Verdict], ranks: int, steps: int) -> dict[str, Any]:
    """The same for programs."""
    return {
        "ranks": ranks,
        "steps": steps,
        "bars": BARS,
        "factors": LAYOUT_FACTORS | MODEL_FACTORS,
        "rows": [_row(row) for row in rows],
        "missing_pairs": _missing_pairs(rows, ranks),
        "left_out": left_out(row.comparison.case.model for row in rows),
        "red": sum(bool(row.red()) for row in rows),
    }


def _row(row: Verdict) -> dict[str, Any]:
    one = row.comparison
    return {
        "section": one.section,
        "layout": asdict(one.case.layout),
        "model": asdict(one.case.model),
        "base": asdict(one.base.layout),
        "differences": {
            compute: {name: _number(found) for name, found in of_type.items()}
            for compute, of_type in row.differences.items()
        },
        "bits": {c: "equal" if where is None else where for c, where in row.bits.items()},
        "torn": row.torn,
        "red": row.red(),
    }


def _number(found: Greatest) -> dict[str, Any]:
    # JSON has no NaN
    value = found.value if math.isfinite(found.value) else str(found.value)
    return {"value": value, "where": found.where}
