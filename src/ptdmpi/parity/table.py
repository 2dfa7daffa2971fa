"""The table of verdicts, as Markdown in lines of at most 120 characters and as JSON."""

import itertools
import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from ptdmpi.config import Layout
from ptdmpi.parity.compare import BARS, MUON_BARS, Greatest, bars_of, left_out
from ptdmpi.parity.layouts import (
    GLOBAL_SIZE,
    LAYOUT_FACTORS,
    MODEL_FACTORS,
    SEQ_LENGTH,
    AdaptedModel,
    Case,
    ComparedModel,
    MuonModel,
    Pair,
    missing_pairs,
    shape_of,
)
from ptdmpi.parity.mixtures import EXPERTS, MixtureModel
from ptdmpi.parity.own import OwnModel
from ptdmpi.parity.probe import SECTION, Probed
from ptdmpi.parity.suite import COVERING, Comparison, Verdict

WIDTH = 120
PROBE_HEADINGS = ("layout", "options", "model", "documents", "losses")
HEADINGS = (
    "t p v d b z",
    "schedule",
    "options",
    "M",
    *(f"{compute} loss norm grads params" for compute in BARS),
    "bits",
)


def text(rows: Sequence[Verdict], ranks: int, steps: int, *, probed: Sequence[Probed] = ()) -> str:
    """Return the table of verdicts as text: all rows, the legend of the abbreviations, the results
    for perturbed tokens, and at the end the number of rows with faults."""
    models = list(dict.fromkeys(row.comparison.case.model for row in rows))
    lines: list[str] = []
    for section, of_section in itertools.groupby(rows, lambda row: row.comparison.section):
        cells = [_cells(row, models) for row in of_section]
        widths = [max(map(len, column)) for column in zip(HEADINGS, *cells, strict=True)]
        lines += [f"{section}:", ""]
        lines += [_line(HEADINGS, widths), _line(["-" * width for width in widths], widths)]
        lines += [*(_line(row, widths) for row in cells), ""]
    if flips := [row for row in rows if row.flips]:
        lines += [*_flips(flips, steps), ""]
    if rows:
        lines += [*_legend(models, steps), ""]
    if any(not isinstance(model, OwnModel) for model in models):
        lines += [*_missing(rows, ranks), ""]
    if probed:
        cells = [_probe_cells(probe) for probe in probed]
        widths = [max(map(len, column)) for column in zip(PROBE_HEADINGS, *cells, strict=True)]
        lines += [f"{SECTION}:", ""]
        lines += [_line(PROBE_HEADINGS, widths), _line(["-" * width for width in widths], widths)]
        lines += [*(_line(row, widths) for row in cells), ""]
    lines += [f"RED: {_describe(row)}: {fault}" for row in rows for fault in row.red()]
    lines += [
        f"RED: {probe_named(probe.case)}: {fault}" for probe in probed for fault in probe.faults
    ]
    count = sum(bool(row.red()) for row in rows) + sum(bool(probe.faults) for probe in probed)
    verdict = f"{count} red" if count else "all ok"
    lines.append(f"{len(rows) + len(probed)} rows, {verdict}")
    return "\n".join(lines)


def named(comparison: Comparison) -> str:
    """Return the name under which `ptdmpi doctor` reports a comparison: section, sizes, schedule,
    options, model."""
    layout = comparison.case.layout
    model = comparison.case.model
    words = [comparison.section, _sizes(layout), layout.schedule, _options(layout), model.kind]
    return ", ".join(words)


def probe_named(case: Case) -> str:
    """Return the name under which `ptdmpi doctor` reports a probe (a test with a perturbed token):
    section, layout, model."""
    words = [SECTION, str(case.layout), case.layout.exchange, case.model.kind]
    return ", ".join([*words, *["documents"][: case.model.documents]])


def _probe_cells(probe: Probed) -> list[str]:
    """Return the table cells of a probe (a test with a perturbed token), in the order of
    `PROBE_HEADINGS`."""
    layout, model = probe.case.layout, probe.case.model
    documents = ("one", "several")[model.documents]
    return [str(layout), _options(layout), model.kind, documents, "RED" if probe.faults else "ok"]


def _describe(row: Verdict) -> str:
    layout = row.comparison.case.layout
    return f"t p v d b z = {_sizes(layout)} {layout.schedule} {_options(layout)}".rstrip(" -")


def _flips(rows: Sequence[Verdict], steps: int) -> list[str]:
    """Return lines about the choices of experts that differ from the choices of the run on one
    rank, for rows with experts."""
    lines = [
        "Choices of experts that differ from the run on one rank. In float32 they were replaced by",
        "the choices of that run.",
    ]
    for row in rows:
        every = steps * GLOBAL_SIZE * SEQ_LENGTH * row.comparison.case.model.layers
        words = ", ".join(f"{compute} {count}" for compute, count in row.flips.items())
        lines.append(f"{_describe(row)}: {words} of {every:,}")
    return lines


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    padded = (cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
    return f"| {' | '.join(padded)} |"


def _cells(row: Verdict, models: Sequence[ComparedModel]) -> list[str]:
    """Return the cells of a row, in the order of `HEADINGS`."""
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
    """Return the cell with the greatest differences in one compute type, and "ok" or "RED"."""
    of_type = row.differences[compute]
    bars = bars_of(row.comparison.case.model)[compute]
    fine = all(greatest.within(bars[name]) for name, greatest in of_type.items())
    fine = fine and not row.torn[compute]
    numbers = [_short(greatest.value) for greatest in of_type.values()]
    return " ".join([*numbers, "ok" if fine else "RED"])


def _short(value: float) -> str:
    if value and math.isfinite(value):
        return f"{value:5.0e}"
    return f"{value:<5.0f}"


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
        f"c{layout.context}": layout.context > 1,
        f"e{layout.expert}": layout.expert > 1,
        "et1": layout.expert_tensor == 1,
        layout.exchange: layout.context > 1,
    }
    return " ".join(word for word, on in words.items() if on) or "-"


def _legend(models: Sequence[ComparedModel], steps: int) -> list[str]:
    """Return the lines that explain the columns, the tolerances and the models."""
    bars = "; ".join(f"{compute} {_bars(BARS[compute])}" for compute in BARS)
    lines = [
        f"{steps} steps; greatest relative difference from one rank that takes the global batch "
        "as one microbatch.",
        "loss, norm: of every step; grads: of the first step; params: after the last step; per "
        "tensor, greatest",
        "difference over greatest magnitude. bits: float32 and bfloat16, loss, norm, gradients and "
        "parameters.",
        f"Bars: {bars}; bits: equal (-: this transport is not exact).",
    ]
    if any(isinstance(model, MuonModel) for model in models):
        lines.append(f"Bars of Muon, which iterates in bfloat16: fp32 {_bars(MUON_BARS['fp32'])}.")
    lines += [
        "sp sequence parallel, sg scatter/gather, sel and full recomputation, pa partitioned;",
        "z: stage of ZeRO, g2: in groups of 2, of: the optimizer's state in a file.",
    ]
    if any(isinstance(model, MixtureModel) for model in models):
        lines += [
            "c2: sequences over 2 ranks, by the method that follows; e2: experts on 2 of the ranks "
            "with the same",
            "layers; et1: whole experts, which the tensor ranks do not divide.",
        ]
    for letter, model in enumerate(models, ord("A")):
        words = f"Model {chr(letter)}: {model.kind}, {', '.join(_model_words(model))}."
        lines += textwrap.wrap(words, WIDTH)
    names = left_out(models)
    if names:
        lines.append(f"Left out, because the true gradient is zero: the keys in {names[0]}")
        lines.append(f"to {names[-1]} (their bits are compared).")
    return lines


def _model_words(model: ComparedModel) -> list[str]:
    """Return the settings of a model in words."""
    words = [
        f"{model.layers} layers",
        f"vocabulary {model.vocab_size}",
        ("untied", "tied")[model.tied],
        ("no dropout", "dropout")[model.dropout],
        ("no masks", "masked tokens")[model.masked],
        ("no documents", "documents")[model.documents],
    ]
    if isinstance(model, AdaptedModel):
        words.append(f"frozen, with {model.method}")
    if isinstance(model, MuonModel):
        words.append("Muon")
    if isinstance(model, MixtureModel):
        words.append(f"{EXPERTS} experts, balance {model.balance}")
    if isinstance(model, OwnModel):
        words.append(f"sublayers {', '.join(shape_of(model).sublayers)}")
    return words


def _bars(bars: Mapping[str, float]) -> str:
    return f"{bars['loss']:.0e} (params {bars['parameters']:.0e})"


def _missing(rows: Sequence[Verdict], ranks: int) -> list[str]:
    """Return lines about the pairs of settings that occur in no row of the covering set, by
    reason."""
    lines: list[str] = []
    missing = _missing_pairs(rows, ranks)
    legal = missing.pop("", [])
    if legal:
        lines.append(f"A short set: {len(legal)} legal pairs of settings are in no row.")
    else:
        lines.append("Every legal pair of settings is in a row of the first table.")
    for reason, pairs in missing.items():
        words = [" ".join(f"{name}={value}" for name, value in pair) for pair in pairs]
        lines += textwrap.wrap(f"Not legal ({reason}): {', '.join(words)}.", WIDTH)
    return lines


def _missing_pairs(rows: Sequence[Verdict], ranks: int) -> dict[str, list[Pair]]:
    covering = [row.comparison.case for row in rows if row.comparison.section == COVERING]
    return missing_pairs(covering, ranks)


def as_json(
    rows: Sequence[Verdict], ranks: int, steps: int, *, probed: Sequence[Probed] = ()
) -> dict[str, Any]:
    """Return the table of verdicts as nested dicts and lists for `json.dumps`."""
    return {
        "ranks": ranks,
        "steps": steps,
        "bars": BARS,
        "factors": LAYOUT_FACTORS | MODEL_FACTORS,
        "rows": [_row(row) for row in rows],
        "missing_pairs": _missing_pairs(rows, ranks),
        "left_out": left_out(row.comparison.case.model for row in rows),
        "probed": [
            {
                "layout": asdict(probe.case.layout),
                "model": asdict(probe.case.model),
                "faults": list(probe.faults),
            }
            for probe in probed
        ],
        "red": sum(bool(row.red()) for row in rows) + sum(bool(probe.faults) for probe in probed),
    }


def _row(row: Verdict) -> dict[str, Any]:
    comparison = row.comparison
    return {
        "section": comparison.section,
        "layout": asdict(comparison.case.layout),
        "model": asdict(comparison.case.model),
        "base": asdict(comparison.base.layout),
        "differences": {
            compute: {name: _number(greatest) for name, greatest in of_type.items()}
            for compute, of_type in row.differences.items()
        },
        "bits": {compute: where or "equal" for compute, where in row.bits.items()},
        "torn": row.torn,
        "flips": row.flips,
        "red": row.red(),
    }


def _number(greatest: Greatest) -> dict[str, Any]:
    """Return a difference as JSON. NaN and infinity become the strings "nan" and "inf"."""
    value: float | str = greatest.value
    if not math.isfinite(greatest.value):
        value = str(greatest.value)
    return {"value": value, "where": greatest.where}
