"""Differences, bits and copies: what is found, and what must not slip through."""

import math
from dataclasses import replace

import pytest
import torch

from ptdmpi.base.box import Box
from ptdmpi.model.state import Piece, assemble
from ptdmpi.parity.compare import BARS, Greatest, differences, first_other_bit, left_out
from ptdmpi.parity.layouts import ComparedModel
from ptdmpi.parity.run import Training

BIAS = "layers.0.attention.qkv.bias"


def training(**changes) -> Training:
    values = {
        "losses": [4.0, 2.0],
        "norms": [1.0, 0.5],
        "gradients": {"a": torch.tensor([1.0, -10.0]), BIAS: torch.arange(6.0)},
        "parameters": {"a": torch.tensor([0.5, 0.25])},
    }
    return Training(**values | changes)


def test_equal_trainings_have_no_difference():
    assert [greatest.value for greatest in differences(training(), training()).values()] == [
        0.0
    ] * 4
    assert first_other_bit(training(), training()) is None


def test_differences_are_relative_and_say_where():
    actual = training(
        losses=[4.0, 2.5],
        norms=[1.1, 0.5],
        gradients={"a": torch.tensor([2.0, -10.0]), BIAS: torch.arange(6.0)},
    )
    measured = differences(actual, training())
    assert measured["loss"] == Greatest(0.25, "step 1")
    assert measured["norm"].value == pytest.approx(0.1)
    assert measured["gradients"].value == pytest.approx(0.1)  # 1 of the tensor's greatest, 10
    assert measured["gradients"].where == "a"


def test_key_biases_are_left_out_of_differences_but_not_of_bits():
    for place in range(6):
        bias = torch.arange(6.0)
        bias[place] += 1.0
        actual = training(gradients={"a": torch.tensor([1.0, -10.0]), BIAS: bias})
        of_keys = place in (2, 3)
        assert (differences(actual, training())["gradients"].value == 0.0) == of_keys
        assert first_other_bit(actual, training()) == f"gradients: {BIAS}"
    names = left_out([ComparedModel(kind="gpt", layers=2), ComparedModel(kind="llama", layers=3)])
    assert names == [BIAS, BIAS.replace("0", "1")]
    assert left_out([ComparedModel(kind="llama")]) == []


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_no_bar_lets_what_is_not_finite_pass(wrong):
    actual = training(losses=[wrong, 2.0], parameters={"a": torch.tensor([wrong, 0.25])})
    measured = differences(actual, training())
    for name in ("loss", "parameters"):
        assert not measured[name].within(BARS["fp32"][name])
    assert first_other_bit(actual, training()) == "loss of step 0"


def test_missing_tensor_is_a_difference():
    measured = differences(training(parameters={}), training())
    assert not measured["parameters"].within(1.0)
    assert first_other_bit(training(parameters={}), training()) == "parameters: a"


def test_one_bit_is_found():
    one_up = torch.nextafter(torch.tensor([0.5, 0.25]), torch.tensor(1.0))
    assert first_other_bit(training(parameters={"a": one_up}), training()) == "parameters: a"


def test_pieces_make_the_whole_and_copies_must_agree():
    box = Box.whole((1, 2))
    top = Piece("weights", "a", (2, 2), box, torch.tensor([[1.0, 2.0]]), ("pipeline",))
    bottom = replace(top, box=Box((1, 0), (2, 2)), values=torch.tensor([[3.0, 4.0]]))
    whole, torn = assemble([top, bottom])
    assert whole["a"].tolist() == [[1.0, 2.0], [3.0, 4.0]]
    assert torn == assemble([top, bottom, top])[1] == []
    assert assemble([top, bottom, replace(top, values=torch.tensor([[1.0, 2.5]]))])[1] == ["a"]
    incomplete, _ = assemble([top])
    assert incomplete["a"][1].isnan().all()
