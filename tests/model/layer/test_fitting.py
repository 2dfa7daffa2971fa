"""Mistakes in a sublayer of a user's own are refused in one line, before anything is computed."""

from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from ptdmpi.base.errors import InputError
from ptdmpi.base.plugins import plugin
from ptdmpi.comm.communicator import OneRank
from ptdmpi.config import Layout, ModelConfig, RecomputeConfig
from ptdmpi.model import built
from ptdmpi.model.operators import Context
from ptdmpi.model.parameters import Split, declare
from ptdmpi.model.tensor_parallel import TensorAxis
from ptdmpi.model.transformer import Block
from ptdmpi.plan.layer import describe
from ptdmpi.plan.layer import sublayer as sublayers
from ptdmpi.plan.layer.legality import layout_mistakes
from ptdmpi.plan.layer.operator import Operator, OwnOperator
from ptdmpi.plan.layer.parts import Scale
from ptdmpi.plan.layer.sublayer import Sublayer
from tests import _own
from tests._configs import small

DOWN, CORE, UP = "gained.down", "gained.core", "gained.up"


def sublayer(build: describe.LayerBuild, name: str, /, **changes: Any) -> Sublayer:
    """The sublayer of `tests._own`, with changes in the operator `name` (or in its linear)."""
    rows = []
    for row in _own.gained(build).operators:
        if row.name == name and "linear" in changes:
            row = replace(row, linear=replace(row.linear, **changes["linear"]))
        elif row.name == name:
            row = replace(row, **changes)
        rows.append(row)
    return Sublayer("gained", tuple(rows))


def described(make: Any) -> ModelConfig:
    """Describe a layer with the sublayer that `make` makes."""

    def named(group: str, name: str) -> Any:
        return make if name == "other" else plugin(group, name)

    model = small({}).model.model_copy(update={"sublayers": ("attention", "mlp", "other")})
    with mock.patch.object(sublayers, "plugin", named):
        describe.layer(model)
    return model


@pytest.mark.parametrize(
    ("name", "changes", "text"),
    [
        (DOWN, {"linear": {"inputs": 72}}, "gained.down reads 'y' with 72 channels, but it has 32"),
        (UP, {"linear": {"outputs": (40,)}}, "gained.residual reads 'y' with 32 channels.*has 40"),
        (DOWN, {"linear": {"outputs": (0,)}}, r"outputs = \(0,\); legal: a tuple of integers"),
        (DOWN, {"linear": {"outputs": 16}}, "outputs = 16; legal: a tuple of integers"),
        (DOWN, {"linear": {"most": (1, 2)}}, "outputs and most have different lengths"),
        (UP, {"linear": {"inputs": -3}}, "inputs = -3; legal: an integer from 1"),
        (UP, {"linear": {"inputs": True}}, "inputs = True; legal: an integer from 1"),
        (UP, {"linear": {"init_std": float("nan")}}, "init_std = nan; legal: a finite number"),
        (UP, {"linear": {"init_std": -0.1}}, "init_std = -0.1; legal: a finite number"),
        (UP, {"linear": {"split": "diagonal"}}, r"split = 'diagonal'; legal: None, or 'columns'"),
        (CORE, {"weight": Scale(0)}, "a Scale gained.core with size = 0; legal: an integer"),
        (CORE, {"weight": 3}, "has a part gained.core of the type int; legal: Linear, "),
        (CORE, {"inputs": ("z",)}, "gained.core reads 'z', which nothing before it writes; legal"),
        (CORE, {"inputs": "y"}, r"has inputs = 'y'; legal: a tuple of names"),
        (CORE, {"name": "gained..core"}, "'gained..core' has an illegal name; legal"),
        (CORE, {"name": None}, "operator None has an illegal name; legal"),
        (CORE, {"name": "gained"}, "gained.down of gained is named as a part of the operator gai"),
        (UP, {"outputs": ("q",)}, "gained.residual reads 'y' with 32 channels, but it has 16"),
        ("gained.residual", {"place": "a"}, "has the number 'a'; legal: an integer from 4"),
        ("gained.residual", {"outputs": ("y",)}, "must write the residual stream, 'x'"),
    ],
)
def test_operators_that_do_not_fit_are_refused(name, changes, text):
    with pytest.raises(InputError, match=text) as error:
        described(lambda build: sublayer(build, name, **changes))
    assert "\n" not in str(error.value) and str(error.value).startswith("model.sublayers: ")


def columns(build: describe.LayerBuild) -> Sublayer:
    """Two linears after each other, both of which divide their outputs."""
    rows = sublayer(build, UP, linear={"split": "columns"}).operators
    return Sublayer("gained", tuple(row for row in rows if row.name != CORE))


def test_channels_that_no_rank_has_are_refused_on_several_ranks():
    """One rank has all channels, so there the same sublayer is legal."""
    name = f"{__name__}:columns"
    model = small({"model.sublayers": ("attention", name, "mlp")}).model
    assert list(layout_mistakes(Layout(1, 1, 1), model, 4)) == []
    (mistake,) = layout_mistakes(Layout(2, 1, 1), model, 4)
    assert mistake.startswith("gained.up: it reads 'y', of which each tensor rank has a part")
    usual = small({"model.sublayers": ("attention", "tests._own:gained", "mlp")}).model
    assert list(layout_mistakes(Layout(2, 1, 1), usual, 4)) == []


class Module(nn.Module):
    def __init__(self, returns: Any) -> None:
        super().__init__()
        self.weight = declare(1, (_own.WIDTH,), 0.5, split=Split(0, (_own.WIDTH,)))
        self.returns = returns

    def forward(self, x: torch.Tensor, context: object) -> Any:
        return self.returns(x)


@dataclass(frozen=True)
class Makes(_own.Gain):
    made: Any = None

    def module(self, build: Any) -> Any:
        return self.made()


def block(made: Any, name: str = CORE) -> Block:
    """A layer whose own operator has the module that `made` makes."""

    def makes(build: describe.LayerBuild) -> Sublayer:
        weight = Scale(_own.WIDTH)
        core: Operator = Makes(name, ("y",), ("y",), weight, made)
        rows = [core if row.name == CORE else row for row in _own.gained(build).operators]
        return Sublayer("gained", tuple(rows))

    def named(group: str, name: str) -> Any:
        return makes if name == "other" else plugin(group, name)

    model = small({}).model.model_copy(update={"sublayers": ("other",)})
    with mock.patch.object(sublayers, "plugin", named):
        return Block(model, TensorAxis(OneRank()), 0, RecomputeConfig())


class Undeclared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(_own.WIDTH))


@pytest.mark.parametrize(
    ("made", "text"),
    [
        (lambda: None, r"module\(\) returned NoneType; legal: a torch.nn.Module"),
        (lambda: exit(), "sublayer operator gained.core ends the program"),
        (Undeclared, "the parameter weight is a Parameter; legal: a result of ptdmpi"),
        (lambda: declare(1, (0,), 0.1), r"gained.core: a parameter of shape \(0,\); legal"),
        (lambda: declare(1, (4,), "word"), "has init = 'word'; legal: a finite number"),
        (lambda: declare(1, (4,), 0.1, split=Split(1, (4,))), "legal: a dim of the shape"),
        (lambda: declare(1, (4,), 0.1, split=Split(0, (3,))), "parts whose sum is the size"),
    ],
)
def test_a_module_that_is_none_is_refused(made, text):
    with pytest.raises(InputError, match=text):
        block(made)


def test_the_name_of_an_attribute_is_refused():
    with pytest.raises(InputError, match="training: the module already has an attribute training"):
        block(lambda: Module(None), "training")


@pytest.mark.parametrize(
    ("returns", "text"),
    [
        (lambda x: None, "gained.core must return 1 tensors"),
        (lambda x: (x, x), "gained.core must return 1 tensors"),
        (lambda x: exit(), "sublayer operator gained.core ends the program"),
        (lambda x: x.flatten(), r"of shape \[256\] .*legal: \[positions, 2, 16\] and torch.float3"),
        (lambda x: x[..., :3], r"of shape \[8, 2, 3\] .*legal: \[positions, 2, 16\]"),
        (lambda x: x[:-1], r"changed the positions: .* is \[7, 2, 32\]; legal: \[8, 2, 32\]"),
        (lambda x: x.double(), r"torch.float64; legal: .* and torch.float32"),
    ],
)
def test_outputs_that_the_next_operator_cannot_read_are_refused(returns, text):
    layer = block(lambda: Module(returns))
    layer.to_empty(device="cpu")
    with pytest.raises(InputError, match=text):
        layer(torch.zeros(8, 2, 32), Context())


def test_names_may_repeat_a_part_and_lie_inside_an_operator():
    owner = nn.Module()
    for name in ("mix", "mix.residual", "gate.gate", "a.b.a"):
        built.add(owner, name, nn.Linear(1, 1, bias=False))
    names = [name for name, _ in owner.named_parameters()]
    assert names == [f"{name}.weight" for name in ("mix", "mix.residual", "gate.gate", "a.b.a")]
    with pytest.raises(InputError, match="gate: the module already has an attribute gate"):
        built.add(owner, "gate", nn.Linear(1, 1))


@dataclass(frozen=True)
class Computes(OwnOperator):
    made: Any = None

    def module(self, build: Any) -> Any:
        return Applied(self.made)


class Applied(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Any) -> Any:
        return self.function(*inputs[:-1])


def test_operators_may_look_keep_values_and_compute_in_other_types():
    """The sublayer `keeps` is named like its first operator, and keeps a value for `uses`."""

    def keeps(build: describe.LayerBuild) -> Sublayer:
        wide = Computes("keeps", ("y",), ("y", "kept"), lambda y: (y, y.double()))
        looks = Computes("keeps.looks", ("kept",), (), lambda kept: ())
        made = build.sublayer("keeps", 5, wide, looks)
        return Sublayer(made.name, list(made.operators))

    def uses(build: describe.LayerBuild) -> Sublayer:
        add = Computes("uses.add", ("kept", "y"), ("y",), lambda kept, y: (kept * y).to(y.dtype))
        return build.sublayer("uses", 6, add)

    def named(group: str, name: str) -> Any:
        return {"keeps": keeps, "uses": uses}[name]

    model = small({}).model.model_copy(update={"sublayers": ("keeps", "uses")})
    with mock.patch.object(sublayers, "plugin", named):
        layer = Block(model, TensorAxis(OneRank()), 0, RecomputeConfig())
        layer.to_empty(device="cpu")
        assert layer(torch.zeros(8, 2, 32), Context()).shape == (8, 2, 32)
