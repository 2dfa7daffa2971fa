"""The measurements of ptdmpi alone: its kernels, and the parts of its step. They time nothing."""

import os
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest

from benchmarks.speed.case import GptSizes, Row
from benchmarks.speed.own import choices, rest
from benchmarks.speed.rounds import Round

TINY = GptSizes(
    layers=2, hidden=32, heads=2, seq_length=16, vocab_size=64, global_size=4, micro_size=1
)
BACKWARD = "autograd::engine::evaluate_function: ColumnLinearBackward"


@pytest.mark.parametrize(
    ("names", "part"),
    [
        ("step", "host"),
        ("step > forward > ColumnLinear", "host"),
        ("step > forward > ColumnLinear > aten::linear > aten::view", "host"),
        ("step > forward > ColumnLinear > aten::linear > aten::addmm", "products"),
        ("step > forward > ColumnLinear > aten::linear > aten::addmm > aten::copy_", "copies"),
        ("step > forward > _RowLinear > mkldnn::_linear_pointwise", "products"),
        (f"step > backward > {BACKWARD} > ColumnLinearBackward > aten::sum", "elementwise"),
        (f"step > backward > {BACKWARD} > ColumnLinearBackward > messages > aten::add", "messages"),
        ("step > forward > ProductAttention > aten::bmm", "attention"),
        ("step > forward > aten::scaled_dot_product_attention > aten::empty", "attention"),
        ("step > forward > aten::layer_norm > aten::native_layer_norm", "norm"),
        ("step > forward > _CrossEntropy > aten::exp_", "loss"),
        ("step > forward > _CrossEntropy > messages", "messages"),
        ("step > forward > _Gelu > aten::sigmoid", "elementwise"),
        ("step > forward > _Gelu > aten::empty", "host"),
        ("step > receive", "waits"),
        ("step > optimizer > aten::_fused_adamw_", "optimizer"),
        ("step > optimizer > messages", "messages"),
        ("step > reduce > aten::copy_", "messages"),
    ],
)
def test_work_belongs_to_one_part(names, part):
    assert rest.part_of(names.split(rest.INSIDE)) == part
    seconds = {names: 3.0, "step > optimizer > aten::mul_": 1.0}
    expected = {"optimizer": 0.25} if part != "optimizer" else {}
    expected[part] = expected.get(part, 0.0) + 0.75 + (0.25 if part == "optimizer" else 0.0)
    assert rest.shares(seconds) == dict.fromkeys(rest.PARTS, 0.0) | expected


def test_the_ratio_is_of_quiet_rounds_and_too_small_ones_are_named():
    row = Row("t=2", "bf16")
    quiet, loud = Round(95.0, 100.0, 0.0), Round(300.0, 100.0, 0.5)
    done = {"default": [loud, quiet], "kept": [loud, replace(quiet, tokens_per_s=101.0)]}
    default, kept = choices.lines(row, done, 1)
    assert default == (
        "t2-bf16: auto / default 0.950 (0.950 to 0.950), 1 rounds, 1 undisturbed, below 0.98"
    )
    assert kept == "t2-bf16: auto / kept 1.010 (1.010 to 1.010), 1 rounds, 1 undisturbed"


def test_a_row_says_which_kernels():
    assert Row("single", "fp32").config.run.kernels == "kept"
    assert Row("single", "fp32", kernels="auto").config.run.kernels == "auto"


@pytest.mark.long
def test_a_row_is_measured(tmp_path):
    """With each kind of kernels, and taken apart: all time of a step belongs to a part."""
    with mock.patch.dict(os.environ, {"XDG_CACHE_HOME": str(tmp_path)}):
        done = choices.rounds_of(Row("t=2", "fp32", TINY), 1)
    assert {len(rounds) for rounds in done.values()} <= {1, 2}
    assert all("attention" in line for line in choices.chosen(Path(tmp_path)))
    lines = list(rest.measured(Row("p=2", "fp32", TINY), 1))
    assert [line[:2] for line in lines] == [("p2-fp32", "0"), ("p2-fp32", "1")]
    for line in lines:
        cells = dict(zip(rest.PARTS, line[3:], strict=False))
        parts = {part: float(cell.rstrip("%")) for part, cell in cells.items()}
        assert parts.keys() == set(rest.PARTS)
        assert abs(sum(parts.values()) - 100.0) < 1.0
