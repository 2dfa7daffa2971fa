"""The table: fits 120 columns, says ok or RED, and JSON says the same."""

import functools
import json
import math
from dataclasses import replace

import pytest

from ptdmpi.parity import layouts, suite, table
from ptdmpi.parity.compare import BARS, BITWISE, Greatest
from ptdmpi.parity.suite import Verdict


@functools.cache
def comparisons() -> list[suite.Comparison]:
    """Return all comparisons of the table."""
    return suite.comparisons(layouts.MOST_RANKS)


def row(comparison: suite.Comparison, value: float = 1e-15) -> Verdict:
    of_type = dict.fromkeys(BARS["fp64"], Greatest(value, "step 3"))
    return Verdict(
        comparison,
        differences=dict.fromkeys(BARS, of_type),
        bits=dict.fromkeys(BITWISE),
        torn={"fp64": [], "fp32": [], "bf16": []},
    )


@functools.cache
def whole() -> list[Verdict]:
    """Return a row of each comparison; none is red."""
    return [row(comparison) for comparison in comparisons()]


def broken(**changes) -> list[Verdict]:
    return [replace(whole()[0], **changes), *whole()[1:]]


@pytest.mark.long
def test_table_of_all_layouts_is_markdown_of_120_columns():
    lines = table.text(whole(), 8, 20).splitlines()
    assert max(map(len, lines)) <= table.WIDTH
    in_table = [line for line in lines if line.startswith("|")]
    assert len(in_table) == len(whole()) + 2 * 7  # each of seven tables has a head and a rule
    assert len({line.count("|") for line in in_table}) == 1
    assert lines[-1] == f"{len(whole())} rows, all ok"
    assert "RED" not in "\n".join(lines)
    assert "Every legal pair of settings is in a row of the first table." in lines


@pytest.mark.parametrize("value", [2e-5, math.nan, math.inf])
def test_a_broken_bar_is_red_and_named(value):
    rows = [row(comparisons()[0], value), *whole()[1:]]
    text = table.text(rows, 8, 20)
    assert text.splitlines()[-1] == f"{len(rows)} rows, 1 red"
    assert f"fp32 loss {value:.1e} at step 3, bar 1e-05" in text
    assert max(map(len, text.splitlines())) <= table.WIDTH
    # every number of float64 is over its bar; the parameters of float32 may be 1e-3 apart
    assert len(rows[0].red()) == (7 if math.isfinite(value) else 8)
    printed = json.loads(json.dumps(table.as_json(rows, 8, 20), allow_nan=False))
    assert printed["red"] == 1
    assert printed["rows"][0]["red"] == rows[0].red()


def test_muon_has_wider_bars_in_float32():
    first = next(comparison for comparison in comparisons() if comparison.section == suite.MUON)
    verdicts = [row(first, value) for value in (2e-5, 2e-4)]
    # all four of float64, and of float32 at first the gradients of the first step alone
    assert [len(comparison.red()) for comparison in verdicts] == [5, 7]
    assert "Bars of Muon, which iterates in bfloat16: fp32 1e-04" in table.text(whole(), 8, 20)
    assert "fp32 norm 2.0e-04 at step 3, bar 1e-04" in table.text(verdicts, 8, 20)


def test_choices_of_experts_that_differ_are_told_and_red_in_float64():
    first = next(comparison for comparison in comparisons() if comparison.section == suite.EXPERTS)
    replaced = replace(row(first), flips={"fp64": 0, "fp32": 3})
    text = table.text([replaced], 8, 20)
    assert "t p v d b z = 1 1 1 2 8 0 gpipe e2: fp64 0, fp32 3 of 20,480" in text.splitlines()
    assert text.endswith("1 rows, all ok") and max(map(len, text.splitlines())) <= table.WIDTH
    assert table.as_json([replaced], 8, 20)["rows"][0]["flips"] == {"fp64": 0, "fp32": 3}
    other = replace(replaced, flips={"fp64": 1, "fp32": 3})
    assert other.red() == ["fp64: 1 choice of experts differs"]
    assert "Choices of experts" not in table.text(whole()[:1], 8, 20)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"bits": {"fp32": None, "bf16": "loss of step 1"}}, "bf16 bits: loss of step 1"),
        ({"torn": {"fp64": [], "fp32": ["a", "b"], "bf16": []}}, "fp32: copies of a, b differ"),
    ],
)
def test_other_bits_and_torn_copies_are_red(changes, said):
    rows = broken(**changes)
    assert rows[0].red() == [said]
    text = table.text(rows, 8, 20)
    assert said in text
    assert sum(line.startswith("|") and "RED" in line for line in text.splitlines()) == 1


def test_json_names_every_setting():
    printed = json.loads(json.dumps(table.as_json(whole(), 8, 20)))
    assert printed["red"] == 0
    assert "" not in printed["missing_pairs"]
    assert printed["left_out"][0] == "layers.0.attention.qkv.bias"
    for comparison, printed_row in zip(comparisons(), printed["rows"], strict=True):
        assert printed_row["layout"]["tensor"] == comparison.case.layout.tensor
        assert printed_row["bits"] == {"fp32": "equal", "bf16": "equal"}
        for compute, bars in BARS.items():
            assert printed_row["differences"][compute].keys() == bars.keys()


def test_short_set_says_what_it_leaves_out():
    rows = [row(comparison) for comparison in suite.comparisons(4, short=True)]
    text = table.text(rows, 4, suite.SHORT_STEPS)
    assert "legal pairs of settings are in no row" in text
    assert "Not legal (more than 4 ranks)" in text


@pytest.mark.long
def test_all_kinds_of_comparisons_are_made():
    of_kind = {
        section: [comparison for comparison in comparisons() if comparison.section == section]
        for section in (suite.COVERING, suite.REPRODUCIBLE, suite.TWICE)
    }
    assert [comparison.case for comparison in of_kind[suite.COVERING]] == layouts.covering_set()
    sizes = {comparison.case.layout.data for comparison in of_kind[suite.REPRODUCIBLE]}
    assert sizes == {2, 4}
    assert all(comparison.base.layout.data == 1 for comparison in of_kind[suite.REPRODUCIBLE])
    (twice,) = of_kind[suite.TWICE]
    assert twice.case == twice.base
    assert twice.compared("fp32", 20) != twice.same_bits("fp32", 20)
