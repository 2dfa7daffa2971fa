"""The messages that rank 0 sends in a step: their number and bytes as counted by the run, and the
bytes as predicted by closed formulas."""

import contextlib
from collections.abc import Mapping
from typing import Any, NamedTuple

from ptdmpi.base.traffic import KINDS, Traffic
from ptdmpi.base.words import counted, file_size
from ptdmpi.config import InputError
from ptdmpi.plan.cost.traffic import StepTraffic
from ptdmpi.report import trained


def sent(record: Mapping[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    """Return a table of the messages that rank 0 has sent: group of ranks -> kind of message ->
    entry.

    An entry has `messages` and `bytes`, which are from the record of the step. It also has
    `closed_form_bytes`, the bytes that the closed formula predicts, and `closed_form_assumes`, the
    assumption of the formula ("" if the formula is exact). The two closed-form entries are None if
    this version cannot read the run's configuration, or if the step had another layout. The table
    is empty for a record of an older version, which did not count messages.
    """
    if "wire_bytes" not in record:
        return {}
    closed_form = None
    with contextlib.suppress(InputError):
        closed_form = _closed_form(config, record)
    sent_bytes = record["wire_bytes"]
    expected = {} if closed_form is None else closed_form.traffic.sent_bytes
    table: dict[str, Any] = {}
    for group in dict.fromkeys((*sent_bytes, *expected)):
        counted_bytes = sent_bytes.get(group, {})
        expected_bytes = expected.get(group, {})
        messages = record["wire_messages"].get(group, {})
        table[group] = {}
        for kind in KINDS:
            if kind in counted_bytes or kind in expected_bytes:
                table[group][kind] = {
                    "messages": messages.get(kind, 0),
                    "bytes": counted_bytes.get(kind, 0),
                    "closed_form_bytes": None,
                    "closed_form_assumes": None,
                }
                if closed_form is not None:
                    table[group][kind] |= {
                        "closed_form_bytes": expected_bytes.get(kind, 0),
                        "closed_form_assumes": closed_form.step.assumption(group, kind),
                    }
    return table


class _ClosedForm(NamedTuple):
    """The closed formulas for the messages of a run (`step`), and the messages of one step
    according to these formulas (`traffic`)."""

    step: StepTraffic
    traffic: Traffic


def _closed_form(config: dict[str, Any], record: Mapping[str, Any]) -> _ClosedForm | None:
    """Return the traffic that closed formulas predict for the recorded step. Return None if the
    step had another layout, or if the formulas say that rank 0 sends nothing. Raise InputError if
    this version cannot read the configuration."""
    checked = trained.resolved(config)
    if str(checked.layout) != record["layout"]:
        return None
    step = StepTraffic.of_config(checked, record["vocab_size"])
    traffic = step.of(rank=0, step=record["step"] - 1)
    return _ClosedForm(step, traffic) if traffic.tallies else None


def rows(table: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the rows of the report's table for `table`, a result of `sent`."""
    return [
        (f"rank 0 sends: {group} {kind.replace('_', '-')}", _text(numbers))
        for group, kinds in table.items()
        for kind, numbers in kinds.items()
    ]


def _text(numbers: Mapping[str, Any]) -> str:
    size = numbers["bytes"] or 0
    foreseen = numbers["closed_form_bytes"]
    text = f"{file_size(size)} a step in {counted(numbers['messages'] or 0, 'message')}"
    if foreseen is None:
        return text
    if assumed := numbers["closed_form_assumes"]:
        return f"{text}; closed form, if {assumed}: {file_size(foreseen)}"
    if foreseen == size:
        return f"{text}; closed form: the same"
    return f"{text}; closed form: {foreseen:,} bytes, not {size:,}"
