"""What rank 0 sends in a step, as the run has counted it and as closed forms have it."""

import contextlib
from collections.abc import Mapping
from typing import Any

from ptdmpi.base.traffic import KINDS, Traffic
from ptdmpi.base.words import counted, file_size
from ptdmpi.config import InputError
from ptdmpi.plan.cost.traffic import StepTraffic
from ptdmpi.plan.layout.grid import DATA
from ptdmpi.plan.layout.messages import RunMethod
from ptdmpi.plan.machine.cluster import Model
from ptdmpi.report import trained


def sent(record: Mapping[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    """group -> kind -> the messages and bytes that a step's record counts, and the closed form's
    bytes, and whether that is exact; without the latter two where this version cannot read the
    run's configuration, or where the step had another layout. Nothing, where an older version wrote
    the record."""
    if "wire_bytes" not in record:
        return {}
    foreseen, is_exact = Traffic(), None
    with contextlib.suppress(InputError):
        foreseen, is_exact = _closed_form(config, record)
    found, messages = record["wire_bytes"], record["wire_messages"]
    expected, table = foreseen.sent_bytes, {}
    for group in dict.fromkeys((*found, *expected)):
        here, there = found.get(group, {}), expected.get(group, {})
        table[group] = {
            kind: {
                "messages": messages.get(group, {}).get(kind, 0),
                "bytes": here.get(kind, 0),
                "closed_form_bytes": there.get(kind, 0) if foreseen.tallies else None,
                "closed_form_is_exact": group != DATA or is_exact if foreseen.tallies else None,
            }
            for kind in KINDS
            if kind in here or kind in there
        }
    return table


def _closed_form(config: dict[str, Any], record: Mapping[str, Any]) -> tuple[Traffic, bool]:
    checked = trained.resolved(config)
    if str(checked.layout) != record["layout"]:
        return Traffic(), False
    step = StepTraffic(
        Model(checked.run.name, checked.model, record["vocab_size"]),
        checked.layout,
        checked.batch.global_size,
        checked.precision.compute,
        predictions=checked.model.predictions(checked.data.mask_fraction),
        reproducible=checked.run.reproducible,
        method=RunMethod.of(checked),
    )
    return step.of(rank=0, step=record["step"] - 1), step.is_exact


def rows(table: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Lines of the report's table."""
    return [
        (f"rank 0 sends: {group} {kind.replace('_', '-')}", _text(numbers))
        for group, kinds in table.items()
        for kind, numbers in kinds.items()
    ]


def _text(numbers: Mapping[str, Any]) -> str:
    size, foreseen = numbers["bytes"] or 0, numbers["closed_form_bytes"]
    text = f"{file_size(size)} a step in {counted(numbers['messages'] or 0, 'message')}"
    if foreseen is None:
        return text
    if not numbers["closed_form_is_exact"]:
        return f"{text}; closed form of large matrices: {file_size(foreseen)}"
    off = f"{foreseen:,} bytes, not {size:,}"
    return f"{text}; closed form: {'the same' if foreseen == size else off}"
